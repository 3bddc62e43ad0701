//! Recorded answers as HTTP: the same bytes the first time and every later time.

use super::body::{self, Body};
use super::problem::Problem;
use super::request::{IDEMPOTENCY_KEY, RequestId};
use crate::cluster::peer::FORWARDED;
use crate::core::event::EventOutcome;
use crate::core::json::write_string;
use crate::core::{Answer, CommandId, LogIdentity, NodeId, Replay, Version};
use hyper::Response;
use hyper::header::{ETAG, HeaderName, HeaderValue};

/// The header that names the node that handled a request.
pub const HANDLED_BY: HeaderName = HeaderName::from_static("quokka-handled-by");
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
const MISMATCH: HeaderName = HeaderName::from_static("idempotency-mismatch");

/// A version as an entity tag.
pub fn etag(version: Version) -> HeaderValue {
    let mut buffer = itoa::Buffer::new();
    let digits = buffer.format(version);
    let mut tag = String::with_capacity(digits.len() + 2);
    tag.push('"');
    tag.push_str(digits);
    tag.push('"');
    HeaderValue::try_from(tag).unwrap_or(HeaderValue::from_static("\"\""))
}

/// A command id as a header.
pub fn idempotency_key(command_id: &CommandId) -> (HeaderName, HeaderValue) {
    // Command ids are printable ASCII, which every header may hold.
    (IDEMPOTENCY_KEY, HeaderValue::from_str(command_id.as_str()).unwrap_or(HeaderValue::from_static("-")))
}

/// Says that a node passed the request on, and to which one.
pub fn passed_on(response: &mut Response<Body>, by: &HeaderValue, owner: &NodeId) {
    let headers = response.headers_mut();
    headers.insert(FORWARDED, by.clone());
    // Names of nodes are letters, digits and a few marks.
    headers.insert(HANDLED_BY, HeaderValue::from_str(owner.as_str()).unwrap_or(HeaderValue::from_static("-")));
}

/// The HTTP answer.
pub fn respond(answer: &Answer, replay: Replay, identity: &LogIdentity, request_id: &RequestId) -> Response<Body> {
    let mut response = match answer.outcome {
        EventOutcome::Accepted => {
            let mut out = String::with_capacity(224 + answer.response.len());
            out.push('{');
            write_members(&mut out, answer, identity);
            out.push('}');
            body::response(out.into_bytes())
        }
        EventOutcome::Rejected => Problem::rejected(answer, identity).respond(request_id),
    };
    let headers = response.headers_mut();
    headers.insert(ETAG, etag(answer.version));
    let (name, value) = idempotency_key(&answer.command_id);
    headers.insert(name, value);
    mark(&mut response, replay);
    response
}

/// Says of a replay that it is one.
pub fn mark(response: &mut Response<Body>, replay: Replay) {
    let headers = response.headers_mut();
    if replay != Replay::First {
        headers.insert(REPLAYED, HeaderValue::from_static("true"));
    }
    if replay == Replay::Mismatch {
        headers.insert(MISMATCH, HeaderValue::from_static("true"));
    }
}

/// Appends the answer as one line of an answer to many commands, newline included.
pub fn write_line(out: &mut String, answer: &Answer, replay: Replay, identity: &LogIdentity, request_id: &RequestId) {
    match answer.outcome {
        EventOutcome::Accepted => {
            out.push_str("{\"status\":200,");
            write_members(out, answer, identity);
        }
        EventOutcome::Rejected => Problem::rejected(answer, identity).write_line(out, request_id),
    }
    out.push_str(match replay {
        Replay::First => "}\n",
        Replay::Again => ",\"replayed\":true}\n",
        Replay::Mismatch => ",\"replayed\":true,\"mismatch\":true}\n",
    });
}

/// Appends the members of an accepted command's answer.
pub fn write_members(out: &mut String, answer: &Answer, identity: &LogIdentity) {
    out.push_str("\"entity_type\":");
    write_string(out, answer.position.partition.entity_type.as_str());
    out.push_str(",\"entity_id\":");
    write_string(out, answer.entity_id.as_str());
    out.push_str(",\"version\":");
    out.push_str(itoa::Buffer::new().format(answer.version));
    out.push_str(",\"command_id\":");
    write_string(out, answer.command_id.as_str());
    out.push_str(",\"response\":");
    out.push_str(answer.response.as_str());
    out.push_str(",\"token\":");
    write_string(out, &answer.position.token(identity));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{CommandName, EntityId, EntityType, Json, Partition, Position, ShardId};

    fn answer(outcome: EventOutcome, response: &str) -> Answer {
        let partition = Partition { entity_type: EntityType::trusted("account"), shard: ShardId(3) };
        Answer {
            position: Position { partition, event_id: 9 },
            entity_id: EntityId::trusted("a1"),
            version: 7,
            command_id: CommandId::trusted("pay\"31"),
            command: CommandName::trusted("charge"),
            request: Json::null(),
            outcome,
            response: Json::trusted(response.to_owned()),
        }
    }

    fn shown(outcome: EventOutcome, response: &str, replay: Replay) -> (u16, Vec<(String, String)>, String, String) {
        let (answer, identity, request_id) = (answer(outcome, response), LogIdentity::new([7; 32]), RequestId::fresh());
        let token = answer.position.token(&identity);
        let answered = respond(&answer, replay, &identity, &request_id);
        let mut headers: Vec<_> = answered.headers().iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
        headers.sort();
        let mut line = String::new();
        write_line(&mut line, &answer, replay, &identity, &request_id);
        let text = String::from_utf8(answered.body().bytes().to_vec()).unwrap();
        (answered.status().as_u16(), headers, text.replace(&token, "TOKEN"), line.replace(&token, "TOKEN"))
    }

    fn headers(of: &[(&str, &str)]) -> Vec<(String, String)> {
        of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn an_accepted_command_is_shown_in_the_order_of_the_contract() {
        let (status, shown, body, line) = self::shown(EventOutcome::Accepted, r#"{"balance":90}"#, Replay::First);
        let members = r#""entity_type":"account","entity_id":"a1","version":7,"command_id":"pay\"31","response":{"balance":90},"token":"TOKEN""#;
        assert_eq!((status, body), (200, format!("{{{members}}}")));
        assert_eq!(line, format!("{{\"status\":200,{members}}}\n"));
        assert_eq!(shown, headers(&[("content-type", "application/json"), ("etag", "\"7\""), ("idempotency-key", "pay\"31")]));
    }

    #[test]
    fn a_replay_has_the_same_body_and_says_what_it_is() {
        for outcome in [EventOutcome::Accepted, EventOutcome::Rejected] {
            let first = shown(outcome, r#"{"code":"no","message":"x"}"#, Replay::First);
            for (replay, extra, end) in [
                (Replay::Again, &[("idempotency-replayed", "true")][..], ",\"replayed\":true}\n"),
                (Replay::Mismatch, &[("idempotency-mismatch", "true"), ("idempotency-replayed", "true")], ",\"replayed\":true,\"mismatch\":true}\n"),
            ] {
                let again = shown(outcome, r#"{"code":"no","message":"x"}"#, replay);
                assert_eq!((first.0, &first.2), (again.0, &again.2));
                assert_eq!(again.3, first.3.trim_end_matches("}\n").to_owned() + end);
                let mut expected = [first.1.clone(), headers(extra)].concat();
                expected.sort();
                assert_eq!(again.1, expected);
            }
        }
    }

    #[test]
    fn a_rejection_is_a_problem_with_all_that_helps() {
        let rejection = r#"{"code":"insufficient_funds","details":{"balance":1},"message":"balance \"too\" low"}"#;
        let (status, _, body, line) = shown(EventOutcome::Rejected, rejection, Replay::First);
        let rest = format!(
            r#""code":"rejected","detail":"balance \"too\" low","entity_type":"account","entity_id":"a1","version":7,"command_id":"pay\"31","rejection":{rejection},"token":"TOKEN"}}"#
        );
        let start = r#""type":"/problems/rejected","title":"The command was rejected","#;
        assert_eq!((status, body), (422, format!("{{{start}\"status\":422,{rest}")));
        assert_eq!(line, format!("{{\"status\":422,{start}{rest}\n"));
    }

    #[test]
    fn a_rejection_without_a_message_still_has_a_detail() {
        for rejection in ["null", "[]", r#"{"message":5}"#] {
            let (_, _, body, _) = shown(EventOutcome::Rejected, rejection, Replay::First);
            assert!(body.contains(r#""detail":"the handler refused the command""#), "{body}");
        }
    }
}
