//! What requests say in their headers and query, read by fixed rules: pure functions over [`HeaderMap`] and texts.

use super::problem::{Code, Problem};
use crate::core::{CommandId, IdError, Precondition, Version};
use hyper::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use percent_encoding::percent_decode_str;
use std::borrow::Cow;

/// The header that carries command ids.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The header that carries request ids.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The longest request id that is taken over from a caller.
const REQUEST_ID_MAX: usize = 128;

/// The largest version that a database can hold.
const VERSION_MAX: Version = i64::MAX as Version;

/// Names one request in answers and in the log; with the trace it belongs to.
#[derive(Debug, Clone)]
pub struct RequestId {
    id: HeaderValue,
    trace_id: Option<String>,
}

impl RequestId {
    /// The caller's `Request-Id` where it is fit to be shown and logged, else a fresh one; the trace from `traceparent`.
    pub fn of(headers: &HeaderMap) -> RequestId {
        let given = headers.get(REQUEST_ID).filter(|value| {
            let bytes = value.as_bytes();
            (1..=REQUEST_ID_MAX).contains(&bytes.len()) && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"._:+/=-".contains(byte))
        });
        let trace_id = headers.get(TRACEPARENT).and_then(|value| trace_id(value.to_str().ok()?)).map(str::to_owned);
        match given {
            Some(id) => RequestId { id: id.clone(), trace_id },
            None => RequestId { trace_id, ..RequestId::fresh() },
        }
    }

    /// A new one.
    pub fn fresh() -> RequestId {
        let id = xid::new().to_string();
        RequestId { id: HeaderValue::try_from(id).unwrap_or(HeaderValue::from_static("-")), trace_id: None }
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        self.id.to_str().unwrap_or_default()
    }

    /// As a header.
    pub fn header(&self) -> HeaderValue {
        self.id.clone()
    }

    /// The W3C trace id, where the caller sent one.
    pub fn trace_id(&self) -> Option<&str> {
        self.trace_id.as_deref()
    }
}

/// The trace id in a W3C `traceparent`: version, trace id, parent id, flags. Later versions may append more.
fn trace_id(traceparent: &str) -> Option<&str> {
    let mut parts = traceparent.split('-');
    let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, length| text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_zero = |text: &str| text.bytes().all(|byte| byte == b'0');
    let is_whole = is_hex(version, 2) && is_hex(trace, 32) && is_hex(parent, 16) && is_hex(flags, 2);
    let is_known = version != "ff" && (version != "00" || parts.next().is_none());
    (is_whole && is_known && !is_zero(trace) && !is_zero(parent)).then_some(trace)
}

/// The command id that the caller gave, if any.
pub fn command_id(headers: &HeaderMap) -> Result<Option<CommandId>, Problem> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(Problem::new(Code::InvalidCommandId, "there is more than one Idempotency-Key header"));
    }
    // A text that is not UTF-8 fails the rule at its first odd character, like any other.
    let text = String::from_utf8_lossy(value.as_bytes());
    CommandId::new(&text).map(Some).map_err(|error: IdError| Problem::invalid_command_id(&error))
}

/// What the caller demands of the entity, if anything: `*` or one strong tag such as `"6"`.
pub fn precondition(headers: &HeaderMap) -> Result<Option<Precondition>, Problem> {
    let mut values = headers.get_all(IF_MATCH).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let text = value.to_str().ok().filter(|_| values.next().is_none());
    let parsed = match text {
        Some("*") => Some(Precondition::Exists),
        Some(text) => text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).and_then(version).map(Precondition::Version),
        None => None,
    };
    let refused = || Problem::new(Code::InvalidQuery, "If-Match must be * or one entity version in double quotes, such as \"6\"");
    parsed.map(Some).ok_or_else(|| refused().with_text("header", "If-Match"))
}

/// A version: decimal digits without leading zeros, in the range of databases.
pub fn version(text: &str) -> Option<Version> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|version| is_plain && *version <= VERSION_MAX)
}

/// Whether `If-None-Match` names this version, so that the caller has it already. Weak comparison, as RFC 9110 has it.
pub fn has_already(headers: &HeaderMap, version: Version) -> bool {
    let mut buffer = itoa::Buffer::new();
    let version = buffer.format(version);
    headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')).map(str::trim).any(|tag| {
        let opaque = tag.strip_prefix("W/").unwrap_or(tag);
        tag == "*" || opaque.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')) == Some(version)
    })
}

/// The kinds of bodies and answers that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Media {
    /// `application/json`.
    Json,
    /// `application/x-ndjson`, also known as `application/ndjson` and `application/jsonl`.
    Lines,
    /// `text/event-stream`.
    Events,
}

impl Media {
    fn is(self, essence: &str) -> bool {
        let names: &[&str] = match self {
            Media::Json => &["application/json"],
            Media::Lines => &["application/x-ndjson", "application/ndjson", "application/jsonl"],
            Media::Events => &["text/event-stream"],
        };
        names.iter().any(|name| essence.eq_ignore_ascii_case(name))
    }

    fn name(self) -> &'static str {
        match self {
            Media::Json => "application/json",
            Media::Lines => "application/x-ndjson",
            Media::Events => "text/event-stream",
        }
    }
}

/// Refuses a body that is compressed or of another kind than `media`.
pub fn check_content(headers: &HeaderMap, media: Media) -> Result<(), Problem> {
    for encoding in headers.get_all(CONTENT_ENCODING) {
        if !encoding.as_bytes().eq_ignore_ascii_case(b"identity") {
            return Err(Problem::new(Code::UnsupportedMediaType, "compressed bodies are not read here; send it without Content-Encoding"));
        }
    }
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let given = match (types.next(), types.next()) {
        (Some(value), None) => value.to_str().unwrap_or_default(),
        (None, _) => "",
        (Some(_), Some(_)) => return Err(Problem::new(Code::UnsupportedMediaType, "there is more than one Content-Type header")),
    };
    let mut parts = given.split(';').map(str::trim);
    let is_media = media.is(parts.next().unwrap_or_default());
    let is_utf8 = parts.all(|parameter| match parameter.split_once('=') {
        Some((name, value)) if name.trim().eq_ignore_ascii_case("charset") => value.trim().trim_matches('"').eq_ignore_ascii_case("utf-8"),
        _ => true,
    });
    if is_media && is_utf8 {
        return Ok(());
    }
    let found = if given.is_empty() { "it has none".to_owned() } else { format!("it is {given}") };
    let detail = format!("a body here needs the header 'Content-Type: {}' (with curl: -H 'Content-Type: {}'); {found}", media.name(), media.name());
    Err(Problem::new(Code::UnsupportedMediaType, detail))
}

/// Refuses callers that exclude answers of the kind `media`.
pub fn check_accept(headers: &HeaderMap, media: Media) -> Result<(), Problem> {
    let mut is_given = false;
    // The most specific range that fits decides, as in RFC 9110: 3 for the type itself, 1 for */*.
    let mut best = (0, true);
    for range in headers.get_all(ACCEPT).iter().flat_map(|value| value.to_str().unwrap_or_default().split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let essence = parts.next().unwrap_or_default();
        if essence.is_empty() {
            continue;
        }
        is_given = true;
        let rank = match essence {
            "*/*" => 1,
            _ if essence.eq_ignore_ascii_case("application/*") => 2,
            _ if media.is(essence) => 3,
            _ => continue,
        };
        let is_excluded = parts.any(|parameter| {
            parameter.split_once('=').is_some_and(|(name, value)| name.trim().eq_ignore_ascii_case("q") && value.trim().parse() == Ok(0.0_f32))
        });
        if rank >= best.0 {
            best = (rank, !is_excluded);
        }
    }
    match best {
        (0, _) if !is_given => Ok(()),
        (1.., true) => Ok(()),
        _ => Err(Problem::new(Code::NotAcceptable, format!("the answer here is {}, which the Accept header excludes", media.name()))),
    }
}

/// Whether the caller names server-sent events among what it takes: a client of them always does, and others take anything.
pub fn wants_events(headers: &HeaderMap) -> bool {
    let ranges = headers.get_all(ACCEPT).iter().flat_map(|value| value.to_str().unwrap_or_default().split(','));
    let mut essences = ranges.map(|range| range.split(';').next().unwrap_or_default().trim());
    essences.any(|essence| Media::Events.is(essence)) && check_accept(headers, Media::Events).is_ok()
}

/// The parameters of a query, in the order of `known`. Unknown, repeated and undecodable ones are refused.
///
/// `+` means itself: nothing that is asked for here holds spaces, and times with an offset hold plus signs.
pub fn parameters<'q, const N: usize>(query: Option<&'q str>, known: [&'static str; N]) -> Result<[Option<Cow<'q, str>>; N], Problem> {
    let mut found = [const { None }; N];
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name = percent_decode_str(name).decode_utf8_lossy();
        let Some(index) = known.iter().position(|known| *known == name) else {
            let detail = match known.len() {
                0 => "there are no parameters here".to_owned(),
                _ => format!("the parameters here are {}", known.join(", ")),
            };
            return Err(Problem::invalid_query(&name, detail));
        };
        let Ok(value) = percent_decode_str(value).decode_utf8() else {
            return Err(Problem::invalid_query(known[index], format!("{} is not UTF-8", known[index])));
        };
        if found[index].replace(value).is_some() {
            return Err(Problem::invalid_query(known[index], format!("{} is given more than once", known[index])));
        }
    }
    Ok(found)
}

/// The parameter `limit`: 1 to 1000, else 100.
pub fn limit(value: Option<&str>) -> Result<usize, Problem> {
    let Some(text) = value else { return Ok(100) };
    let number = version(text).filter(|number| (1..=1000).contains(number));
    number.map(|number| number as usize).ok_or_else(|| Problem::invalid_query("limit", "limit must be a whole number from 1 to 1000"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[&str]) -> HeaderMap {
        let pair = |line: &&str| {
            let (name, value) = line.split_once(": ").unwrap();
            (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap())
        };
        let mut map = HeaderMap::new();
        lines.iter().map(pair).for_each(|(name, value)| {
            map.append(name, value);
        });
        map
    }

    fn shown<T: std::fmt::Debug>(result: Result<T, Problem>) -> String {
        match result {
            Ok(value) => format!("{value:?}"),
            Err(problem) => format!("{}: {}", problem.code().as_str(), problem.detail()),
        }
    }

    #[test]
    fn command_ids_are_taken_byte_for_byte() {
        let k256 = "k".repeat(256);
        let k257 = "k".repeat(257);
        for (lines, expected) in [
            (vec![], "None".to_owned()),
            (vec!["idempotency-key: pay-31".to_owned()], "Some(\"pay-31\")".to_owned()),
            (vec![r#"idempotency-key: "q""#.to_owned()], r#"Some("\"q\"")"#.to_owned()),
            (vec![format!("idempotency-key: {k256}")], format!("Some({k256:?})")),
            (vec![format!("idempotency-key: {k257}")], "invalid-command-id: the command id is 257 characters long; at most 256 are allowed".to_owned()),
            (vec!["idempotency-key: ".to_owned()], "invalid-command-id: the command id is empty".to_owned()),
            (
                vec!["idempotency-key: a b".to_owned()],
                "invalid-command-id: the command id may hold only printable ASCII characters without spaces; character 2 is something else".to_owned(),
            ),
            (
                vec!["idempotency-key: 🍣".to_owned()],
                "invalid-command-id: the command id may hold only printable ASCII characters without spaces; character 1 is something else".to_owned(),
            ),
            (
                vec!["idempotency-key: a".to_owned(), "idempotency-key: a".to_owned()],
                "invalid-command-id: there is more than one Idempotency-Key header".to_owned(),
            ),
        ] {
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            assert_eq!(shown(command_id(&headers(&lines))), expected, "{lines:?}");
        }
    }

    #[test]
    fn preconditions_are_one_strong_tag_or_a_star() {
        let refused = "invalid-query: If-Match must be * or one entity version in double quotes, such as \"6\"";
        for (lines, expected) in [
            (&[][..], "None"),
            (&["if-match: \"6\""], "Some(Version(6))"),
            (&["if-match: \"0\""], "Some(Version(0))"),
            (&["if-match: *"], "Some(Exists)"),
            (&["if-match: 6"], refused),
            (&["if-match: \"06\""], refused),
            (&["if-match: \"+6\""], refused),
            (&["if-match: \"\""], refused),
            (&["if-match: \""], refused),
            (&["if-match: W/\"6\""], refused),
            (&["if-match: \"6\", \"7\""], refused),
            (&["if-match: \"6\"", "if-match: \"6\""], refused),
            (&["if-match: \"abc\""], refused),
            (&["if-match: \"9223372036854775808\""], refused),
        ] {
            assert_eq!(shown(precondition(&headers(lines))), expected, "{lines:?}");
        }
    }

    #[test]
    fn if_none_match_compares_weakly_and_takes_lists() {
        for (lines, expected) in [
            (&[][..], false),
            (&["if-none-match: \"7\""], true),
            (&["if-none-match: W/\"7\""], true),
            (&["if-none-match: *"], true),
            (&["if-none-match: \"6\", \"7\""], true),
            (&["if-none-match: \"6\"", "if-none-match: \"7\""], true),
            (&["if-none-match: \"6\""], false),
            (&["if-none-match: 7"], false),
            (&["if-none-match: \"77\""], false),
        ] {
            assert_eq!(has_already(&headers(lines), 7), expected, "{lines:?}");
        }
    }

    #[test]
    fn bodies_are_json_in_utf8_and_not_compressed() {
        for (lines, fine) in [
            (&["content-type: application/json"][..], true),
            (&["content-type: Application/JSON; charset=UTF-8"], true),
            (&["content-type: application/json;charset=\"utf-8\"; v=1"], true),
            (&["content-type: application/json", "content-encoding: identity"], true),
            (&[], false),
            (&["content-type: application/x-www-form-urlencoded"], false),
            (&["content-type: application/json; charset=latin1"], false),
            (&["content-type: application/json", "content-type: application/json"], false),
            (&["content-type: application/json", "content-encoding: gzip"], false),
            (&["content-type: application/json", "content-encoding: identity", "content-encoding: gzip"], false),
            (&["content-type: application/x-ndjson"], false),
        ] {
            let checked = check_content(&headers(lines), Media::Json).map_err(|problem| problem.code());
            assert_eq!(checked, if fine { Ok(()) } else { Err(Code::UnsupportedMediaType) }, "{lines:?}");
        }
        assert!(check_content(&headers(&["content-type: application/x-ndjson"]), Media::Lines).is_ok());
        let form = check_content(&headers(&["content-type: application/x-www-form-urlencoded"]), Media::Json).unwrap_err();
        assert!(form.detail().contains("-H 'Content-Type: application/json'"), "{}", form.detail());
    }

    #[test]
    fn an_accept_header_may_exclude_json() {
        for (lines, fine) in [
            (&[][..], true),
            (&["accept: "], true),
            (&["accept: */*"], true),
            (&["accept: application/*;q=0.1"], true),
            (&["accept: text/html, application/json;q=0.9"], true),
            (&["accept: text/html", "accept: application/JSON"], true),
            (&["accept: text/html"], false),
            (&["accept: application/json;q=0"], false),
            (&["accept: */*, application/json;q=0.0"], false),
            (&["accept: application/json, */*;q=0"], true),
            (&["accept: application/xml, text/*"], false),
        ] {
            let checked = check_accept(&headers(lines), Media::Json).map_err(|problem| problem.code());
            assert_eq!(checked, if fine { Ok(()) } else { Err(Code::NotAcceptable) }, "{lines:?}");
        }
    }

    #[test]
    fn parameters_are_known_decodable_and_given_once() {
        let read = |query| parameters(query, ["after", "limit"]).map(|found| found.map(|value| value.map(Cow::into_owned)));
        let value = |text: &str| Some(text.to_owned());
        for (query, expected) in [
            (None, Ok([None, None])),
            (Some(""), Ok([None, None])),
            (Some("limit=5&after=a%62+c"), Ok([value("ab+c"), value("5")])),
            (Some("&limit&"), Ok([None, value("")])),
            (Some("%6Cimit=5"), Ok([None, value("5")])),
            (Some("limit=5&limit=5"), Err("limit is given more than once")),
            (Some("Limit=5"), Err("the parameters here are after, limit")),
            (Some("limit=%ff"), Err("limit is not UTF-8")),
            (Some("%ff=1"), Err("the parameters here are after, limit")),
        ] {
            let read = read(query);
            assert_eq!(
                read.as_ref().map_err(|problem| (problem.code(), problem.detail())),
                expected.as_ref().map_err(|text| (Code::InvalidQuery, *text)),
                "{query:?}"
            );
        }
        assert_eq!(shown(parameters(Some("a=1"), [])), "invalid-query: there are no parameters here");
    }

    #[test]
    fn limits_are_one_to_a_thousand() {
        for (text, expected) in [
            (None, Some(100)),
            (Some("1"), Some(1)),
            (Some("1000"), Some(1000)),
            (Some("0"), None),
            (Some("1001"), None),
            (Some(""), None),
            (Some("-1"), None),
            (Some("1e2"), None),
        ] {
            assert_eq!(limit(text).ok(), expected, "{text:?}");
        }
    }

    #[test]
    fn trace_ids_are_those_of_the_w3c() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (text, expected) in [
            (format!("00-{trace}-00f067aa0ba902b7-01"), Some(trace)),
            (format!("01-{trace}-00f067aa0ba902b7-01-more"), Some(trace)),
            (format!("00-{trace}-00f067aa0ba902b7-01-more"), None),
            (format!("ff-{trace}-00f067aa0ba902b7-01"), None),
            (format!("00-{trace}-0000000000000000-01"), None),
            (format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), None),
            (format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()), None),
            (format!("00-{trace}-00f067aa0ba902b7"), None),
            (String::new(), None),
        ] {
            assert_eq!(trace_id(&text), expected, "{text}");
        }
    }

    #[test]
    fn request_ids_are_echoed_where_they_are_fit_to_be_shown() {
        for (given, echoed) in
            [("abc-1.2_3", true), ("a b", false), ("<script>", false), ("é", false), ("", false), (&*"x".repeat(128), true), (&*"x".repeat(129), false)]
        {
            let id = RequestId::of(&headers(&[&format!("request-id: {given}")]));
            assert_eq!(id.as_str() == given, echoed, "{given}");
            assert!(!id.as_str().is_empty());
        }
    }
}
