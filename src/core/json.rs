//! Canonical JSON: the one text form in which quokka stores and answers documents.
//!
//! [`Json`] can only be made by [`Json::canonical`] (or from another `Json`), so whoever holds one knows: valid UTF-8,
//! no duplicate keys, nesting within [`DEPTH_MAX`], every number representable, keys sorted by their UTF-8 bytes, no
//! spaces. Two documents are the same document exactly when their texts are equal. Canonicalising is one pass over the
//! input that writes the output directly; no tree is built.
//!
//! Numbers: a number whose value is an integer of at most 2^53-1, and every integer literal of i64 or u64, is written
//! as an integer; every other number as the shortest text that reads back as the same f64, always with a point or an
//! exponent so that it stays a float when it is read again.

use bytestring::ByteString;
use std::fmt;
use std::ops::Range;

/// The deepest nesting of arrays and objects that is accepted (MySQL's JSON functions read no deeper).
pub const DEPTH_MAX: usize = 100;

/// The largest integer that an f64 holds without a doubt: 2^53 - 1.
pub const SAFE_INTEGER_MAX: f64 = 9_007_199_254_740_991.0;

/// One JSON document in canonical form; a clone shares the text.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Json(ByteString);

/// Why a text is not accepted as JSON, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at byte {offset}")]
pub struct JsonError {
    /// What is wrong.
    pub reason: JsonErrorReason,
    /// Bytes from the start of the text.
    pub offset: usize,
}

/// The kinds of text that are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JsonErrorReason {
    /// The text ended inside a value.
    #[error("the text ends inside a value")]
    UnexpectedEnd,
    /// A byte that cannot stand here.
    #[error("unexpected character")]
    UnexpectedCharacter,
    /// More text after the value.
    #[error("more text follows the value")]
    TrailingData,
    /// A UTF-8 byte-order mark at the start.
    #[error("the text starts with a byte-order mark")]
    ByteOrderMark,
    /// Bytes that are not UTF-8.
    #[error("invalid UTF-8")]
    InvalidUtf8,
    /// A control character inside a string, unescaped.
    #[error("unescaped control character in a string")]
    ControlCharacter,
    /// A backslash followed by something that is no escape.
    #[error("invalid escape in a string")]
    InvalidEscape,
    /// Half of a surrogate pair.
    #[error("lone surrogate in a string")]
    LoneSurrogate,
    /// The same key twice in one object.
    #[error("duplicate key in an object")]
    DuplicateKey,
    /// A number that breaks the grammar, such as `01` or `1.`.
    #[error("invalid number")]
    InvalidNumber,
    /// An integer outside i64 and u64.
    #[error("integer outside the 64-bit range")]
    IntegerRange,
    /// A number that an f64 turns into infinity or zero.
    #[error("number outside the range of a 64-bit float")]
    FloatRange,
    /// Nested deeper than [`DEPTH_MAX`].
    #[error("nested deeper than 100 levels")]
    TooDeep,
}

impl Json {
    /// Reads one JSON text and keeps its canonical form; refuses what [`JsonErrorReason`] lists.
    pub fn canonical(text: &[u8]) -> Result<Json, JsonError> {
        let fail = |reason, offset| Err(JsonError { reason, offset });
        if text.starts_with(b"\xef\xbb\xbf") {
            return fail(JsonErrorReason::ByteOrderMark, 0);
        }
        let text = match std::str::from_utf8(text) {
            Ok(text) => text,
            Err(error) => return fail(JsonErrorReason::InvalidUtf8, error.valid_up_to()),
        };
        let mut reader = Reader { text, bytes: text.as_bytes(), at: 0, out: String::with_capacity(text.len()), depth: 0 };
        reader.space();
        reader.value()?;
        reader.space();
        if reader.at < text.len() {
            return fail(JsonErrorReason::TrailingData, reader.at);
        }
        Ok(Json(reader.out.into()))
    }

    /// Takes a text that quokka wrote itself in canonical form, such as a stored column.
    ///
    /// The caller vouches for the form; nothing is checked.
    pub fn trusted(text: impl Into<ByteString>) -> Json {
        Json(text.into())
    }

    /// The document `null`.
    pub fn null() -> Json {
        Json(ByteString::from_static("null"))
    }

    /// The document `{}`.
    pub fn empty_object() -> Json {
        Json(ByteString::from_static("{}"))
    }

    /// A serde value as canonical text. Fails where the value nests too deep or holds a map with keys that are no strings.
    pub fn from_serialize<T: serde::Serialize + ?Sized>(value: &T) -> Result<Json, String> {
        let text = serde_json::to_vec(value).map_err(|error| error.to_string())?;
        Json::canonical(&text).map_err(|error| error.to_string())
    }

    /// The canonical text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text without a copy.
    pub fn into_bytes(self) -> bytes::Bytes {
        self.0.into_bytes()
    }

    /// Whether both share one text, so that they are known to be the same without reading them. False says nothing of equal texts.
    pub fn is_same_buffer(&self, other: &Json) -> bool {
        std::ptr::eq(self.as_str(), other.as_str())
    }

    /// Length of the text in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never true: the shortest document has one character. Here because `len` is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the document is `null`.
    pub fn is_null(&self) -> bool {
        self.as_str() == "null"
    }

    /// The document as a serde value, for schemas and typed handlers.
    pub fn parse<T: serde::de::DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.as_str())
    }
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Serialises as a string holding the text: the form in which processes of quokka hand documents to each other.
impl serde::Serialize for Json {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> serde::Deserialize<'de> for Json {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        String::deserialize(deserializer).map(Json::trusted)
    }
}

/// Appends a string literal in canonical form: the short escapes, `\u00xx` for other control characters, all else as is.
pub fn write_string(out: &mut String, text: &str) {
    out.push('"');
    let mut copied = 0;
    for (at, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.push_str(&text[copied..at]);
        copied = at + 1;
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            0x08 => out.push_str("\\b"),
            0x09 => out.push_str("\\t"),
            0x0a => out.push_str("\\n"),
            0x0c => out.push_str("\\f"),
            0x0d => out.push_str("\\r"),
            control => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.push_str("\\u00");
                out.push(HEX[usize::from(control >> 4)] as char);
                out.push(HEX[usize::from(control & 15)] as char);
            }
        }
    }
    out.push_str(&text[copied..]);
    out.push('"');
}

/// Appends a finite number in canonical form. Returns false, and appends nothing, for NaN and the infinities.
pub fn write_f64(out: &mut String, number: f64) -> bool {
    if !number.is_finite() {
        return false;
    }
    if number.fract() == 0.0 && number.abs() <= SAFE_INTEGER_MAX {
        out.push_str(itoa::Buffer::new().format(number as i64));
    } else {
        out.push_str(ryu::Buffer::new().format_finite(number));
    }
    true
}

/// One member of an object that is being written: its key as text and where `"key":value` stands in the output.
struct Member {
    key: String,
    written: Range<usize>,
}

struct Reader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    out: String,
    depth: usize,
}

impl Reader<'_> {
    fn fail<T>(&self, reason: JsonErrorReason) -> Result<T, JsonError> {
        Err(JsonError { reason, offset: self.at })
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.bytes.get(self.at) {
            self.at += 1;
        }
    }

    fn value(&mut self) -> Result<(), JsonError> {
        match self.bytes.get(self.at) {
            None => self.fail(JsonErrorReason::UnexpectedEnd),
            Some(b'{') => self.nested(Self::object),
            Some(b'[') => self.nested(Self::array),
            Some(b'"') => self.string().map(|key| write_string(&mut self.out, &key)),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.word("true"),
            Some(b'f') => self.word("false"),
            Some(b'n') => self.word("null"),
            Some(_) => self.fail(JsonErrorReason::UnexpectedCharacter),
        }
    }

    fn nested(&mut self, read: fn(&mut Self) -> Result<(), JsonError>) -> Result<(), JsonError> {
        if self.depth == DEPTH_MAX {
            return self.fail(JsonErrorReason::TooDeep);
        }
        self.depth += 1;
        self.at += 1;
        read(self)?;
        self.depth -= 1;
        Ok(())
    }

    fn word(&mut self, word: &str) -> Result<(), JsonError> {
        let rest = &self.bytes[self.at..];
        if rest.starts_with(word.as_bytes()) {
            self.at += word.len();
            self.out.push_str(word);
            return Ok(());
        }
        let matching = rest.iter().zip(word.bytes()).take_while(|(a, b)| **a == *b).count();
        self.at += matching;
        self.fail(if matching == rest.len() { JsonErrorReason::UnexpectedEnd } else { JsonErrorReason::UnexpectedCharacter })
    }

    /// Takes `byte` after white space, or says that it is missing.
    fn expect(&mut self, byte: u8) -> Result<(), JsonError> {
        self.space();
        match self.bytes.get(self.at) {
            Some(found) if *found == byte => {
                self.at += 1;
                Ok(())
            }
            Some(_) => self.fail(JsonErrorReason::UnexpectedCharacter),
            None => self.fail(JsonErrorReason::UnexpectedEnd),
        }
    }

    /// After an element: true where a comma announces another one, false where `close` ends the list.
    fn another(&mut self, close: u8) -> Result<bool, JsonError> {
        self.space();
        match self.bytes.get(self.at) {
            Some(b',') => {
                self.at += 1;
                self.space();
                Ok(true)
            }
            Some(found) if *found == close => {
                self.at += 1;
                Ok(false)
            }
            Some(_) => self.fail(JsonErrorReason::UnexpectedCharacter),
            None => self.fail(JsonErrorReason::UnexpectedEnd),
        }
    }

    /// True, and past it, where the list closes at once.
    fn closes(&mut self, close: u8) -> bool {
        self.space();
        let closes = self.bytes.get(self.at) == Some(&close);
        self.at += usize::from(closes);
        closes
    }

    fn array(&mut self) -> Result<(), JsonError> {
        self.out.push('[');
        if !self.closes(b']') {
            loop {
                self.value()?;
                if !self.another(b']')? {
                    break;
                }
                self.out.push(',');
            }
        }
        self.out.push(']');
        Ok(())
    }

    fn object(&mut self) -> Result<(), JsonError> {
        self.out.push('{');
        if !self.closes(b'}') {
            let start = self.out.len();
            let mut members: Vec<Member> = Vec::new();
            let mut sorted = true;
            loop {
                let key_at = self.at;
                if self.bytes.get(self.at) != Some(&b'"') {
                    return self.fail(if self.at < self.bytes.len() { JsonErrorReason::UnexpectedCharacter } else { JsonErrorReason::UnexpectedEnd });
                }
                let key = self.string()?;
                if let Some(last) = members.last() {
                    match last.key.as_str().cmp(&key) {
                        std::cmp::Ordering::Less => {}
                        std::cmp::Ordering::Equal => return Err(JsonError { reason: JsonErrorReason::DuplicateKey, offset: key_at }),
                        std::cmp::Ordering::Greater => sorted = false,
                    }
                }
                let from = self.out.len();
                write_string(&mut self.out, &key);
                self.expect(b':')?;
                self.out.push(':');
                self.space();
                self.value()?;
                members.push(Member { key, written: from..self.out.len() });
                if !self.another(b'}')? {
                    break;
                }
                self.out.push(',');
            }
            if !sorted {
                self.sort(start, members)?;
            }
        }
        self.out.push('}');
        Ok(())
    }

    /// Puts the members written since `start` into the order of their keys.
    fn sort(&mut self, start: usize, mut members: Vec<Member>) -> Result<(), JsonError> {
        members.sort_by(|a, b| a.key.cmp(&b.key));
        if members.windows(2).any(|pair| pair[0].key == pair[1].key) {
            return self.fail(JsonErrorReason::DuplicateKey);
        }
        let mut ordered = String::with_capacity(self.out.len() - start);
        for (index, member) in members.into_iter().enumerate() {
            if index > 0 {
                ordered.push(',');
            }
            ordered.push_str(&self.out[member.written]);
        }
        self.out.truncate(start);
        self.out.push_str(&ordered);
        Ok(())
    }

    /// Reads a string literal, at its opening quote, into its text.
    fn string(&mut self) -> Result<String, JsonError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            let from = self.at;
            while self.bytes.get(self.at).is_some_and(|byte| *byte >= 0x20 && *byte != b'"' && *byte != b'\\') {
                self.at += 1;
            }
            text.push_str(&self.text[from..self.at]);
            match self.bytes.get(self.at) {
                None => return self.fail(JsonErrorReason::UnexpectedEnd),
                Some(b'"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => text.push(self.escape()?),
                Some(_) => return self.fail(JsonErrorReason::ControlCharacter),
            }
        }
    }

    /// Reads one escape, at its backslash.
    fn escape(&mut self) -> Result<char, JsonError> {
        let start = self.at;
        self.at += 1;
        let Some(kind) = self.bytes.get(self.at) else { return self.fail(JsonErrorReason::UnexpectedEnd) };
        let simple = match kind {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                self.at += 1;
                let unit = self.hex4()?;
                let lone = Err(JsonError { reason: JsonErrorReason::LoneSurrogate, offset: start });
                let code = match unit {
                    0xd800..=0xdbff if self.bytes[self.at..].starts_with(b"\\u") => {
                        self.at += 2;
                        match self.hex4()? {
                            low @ 0xdc00..=0xdfff => 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00),
                            _ => return lone,
                        }
                    }
                    unit => unit,
                };
                return char::from_u32(code).map_or(lone, Ok);
            }
            _ => return self.fail(JsonErrorReason::InvalidEscape),
        };
        self.at += 1;
        Ok(simple)
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let mut unit = 0;
        for _ in 0..4 {
            let Some(byte) = self.bytes.get(self.at) else { return self.fail(JsonErrorReason::UnexpectedEnd) };
            let Some(digit) = char::from(*byte).to_digit(16) else { return self.fail(JsonErrorReason::InvalidEscape) };
            unit = unit * 16 + digit;
            self.at += 1;
        }
        Ok(unit)
    }

    /// Takes digits; fails where there is none.
    fn digits(&mut self) -> Result<(), JsonError> {
        let from = self.at;
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        if self.at > from {
            return Ok(());
        }
        self.fail(if self.at < self.bytes.len() { JsonErrorReason::InvalidNumber } else { JsonErrorReason::UnexpectedEnd })
    }

    fn number(&mut self) -> Result<(), JsonError> {
        let from = self.at;
        let fail = |reason| Err(JsonError { reason, offset: from });
        if self.bytes[self.at] == b'-' {
            self.at += 1;
        }
        let leading_zero = self.bytes.get(self.at) == Some(&b'0');
        let whole_from = self.at;
        self.digits()?;
        if leading_zero && self.at > whole_from + 1 {
            return fail(JsonErrorReason::InvalidNumber);
        }
        let mut is_float = false;
        if self.bytes.get(self.at) == Some(&b'.') {
            is_float = true;
            self.at += 1;
            self.digits()?;
        }
        let mantissa = &self.bytes[from..self.at];
        if let Some(b'e' | b'E') = self.bytes.get(self.at) {
            is_float = true;
            self.at += 1;
            if let Some(b'+' | b'-') = self.bytes.get(self.at) {
                self.at += 1;
            }
            self.digits()?;
        }
        let literal = &self.text[from..self.at];
        if !is_float {
            if let Ok(number) = literal.parse::<i64>() {
                self.out.push_str(itoa::Buffer::new().format(number));
            } else if let Ok(number) = literal.parse::<u64>() {
                self.out.push_str(itoa::Buffer::new().format(number));
            } else {
                return fail(JsonErrorReason::IntegerRange);
            }
            return Ok(());
        }
        let number: f64 = match literal.parse() {
            Ok(number) => number,
            Err(_) => return fail(JsonErrorReason::InvalidNumber),
        };
        // A literal that is not zero but reads as zero has lost its value as surely as one that reads as infinity.
        let underflow = number == 0.0 && mantissa.iter().any(|byte| (b'1'..=b'9').contains(byte));
        if underflow || !write_f64(&mut self.out, number) {
            return fail(JsonErrorReason::FloatRange);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use JsonErrorReason::*;

    fn canonical(text: &str) -> String {
        Json::canonical(text.as_bytes()).map_or_else(|error| format!("{:?}@{}", error.reason, error.offset), |json| json.to_string())
    }

    #[test]
    fn texts_take_their_one_canonical_form() {
        for (text, expected) in [
            (" null ", "null"),
            ("true", "true"),
            (r#"{"zeta":1, "alpha":[1 , 2],"b":{}}"#, r#"{"alpha":[1,2],"b":{},"zeta":1}"#),
            (r#"{"b":{"d":1,"c":2},"a":{"f":[{"z":1,"y":2}]}}"#, r#"{"a":{"f":[{"y":2,"z":1}]},"b":{"c":2,"d":1}}"#),
            (r#""\u0041\/\u00e9\ud83d\ude00\u0000\u001f\u007f\n""#, "\"A/é😀\\u0000\\u001f\u{7f}\\n\""),
            (r#"{"__proto__":1,"constructor":2}"#, r#"{"__proto__":1,"constructor":2}"#),
            (r#"{"a\"b":1,"\u00e9":2}"#, "{\"a\\\"b\":1,\"é\":2}"),
            ("9007199254740993", "9007199254740993"),
            ("18446744073709551615", "18446744073709551615"),
            ("-9223372036854775808", "-9223372036854775808"),
            ("-0", "0"),
            ("-0.0", "0"),
            ("1.0", "1"),
            ("1e2", "100"),
            ("0e999999999", "0"),
            ("9007199254740991.0", "9007199254740991"),
            ("9007199254740992.0", "9007199254740992.0"),
            ("1e20", "1e20"),
            ("1e308", "1e308"),
            ("5e-324", "5e-324"),
            ("1.5777777777770001", "1.5777777777770001"),
            ("117.63331139400017", "117.63331139400017"),
            ("0.1234567890123456789", "0.12345678901234568"),
        ] {
            assert_eq!(canonical(text), expected, "{text}");
        }
    }

    #[test]
    fn texts_outside_the_rules_are_refused_with_their_place() {
        for (text, reason, offset) in [
            ("", UnexpectedEnd, 0),
            ("\u{feff}1", ByteOrderMark, 0),
            ("1 2", TrailingData, 2),
            ("{}x", TrailingData, 2),
            ("nul", UnexpectedEnd, 3),
            ("nulL", UnexpectedCharacter, 3),
            ("NaN", UnexpectedCharacter, 0),
            ("[1,]", UnexpectedCharacter, 3),
            (r#"{"a":1,}"#, UnexpectedCharacter, 7),
            (r#"{"a" 1}"#, UnexpectedCharacter, 5),
            (r#"{"charge":1,"charge":1000}"#, DuplicateKey, 12),
            (r#"{"a":1,"\u0061":2}"#, DuplicateKey, 7),
            (r#""\ud800""#, LoneSurrogate, 1),
            (r#""\udc00""#, LoneSurrogate, 1),
            (r#""\ud800\ud800""#, LoneSurrogate, 1),
            (r#""\x""#, InvalidEscape, 2),
            ("\"a\nb\"", ControlCharacter, 2),
            ("01", InvalidNumber, 0),
            ("1.", UnexpectedEnd, 2),
            ("1.x", InvalidNumber, 2),
            ("-", UnexpectedEnd, 1),
            ("1e400", FloatRange, 0),
            ("-1e400", FloatRange, 0),
            ("1e309", FloatRange, 0),
            ("1e-400", FloatRange, 0),
            ("1e999999999", FloatRange, 0),
            ("18446744073709551616", IntegerRange, 0),
            ("-9223372036854775809", IntegerRange, 0),
        ] {
            assert_eq!(Json::canonical(text.as_bytes()), Err(JsonError { reason, offset }), "{text}");
        }
        let unsorted = Json::canonical(br#"{"b":1,"a":2,"b":3}"#);
        assert_eq!(unsorted.map_err(|error| error.reason), Err(DuplicateKey));
        assert_eq!(Json::canonical(b"\"\xff\"").map_err(|error| error.reason), Err(InvalidUtf8));
        assert_eq!(Json::canonical("9".repeat(10_000).as_bytes()).map_err(|error| error.reason), Err(IntegerRange));
    }

    #[test]
    fn nesting_is_accepted_to_one_hundred_levels() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        for depth in [1, 31, 32, 100] {
            assert_eq!(canonical(&nested(depth)), nested(depth));
        }
        for depth in [101, 127, 128, 10_000, 1_000_000] {
            assert_eq!(Json::canonical(nested(depth).as_bytes()).map_err(|error| error.reason), Err(TooDeep), "{depth}");
        }
    }

    mod properties {
        use super::*;
        use proptest::prelude::*;
        use serde_json::Value;

        fn value() -> impl Strategy<Value = Value> {
            let leaf = prop_oneof![
                Just(Value::Null),
                any::<bool>().prop_map(Value::from),
                any::<i64>().prop_map(Value::from),
                any::<u64>().prop_map(Value::from),
                any::<f64>().prop_map(Value::from),
                any::<String>().prop_map(Value::from),
            ];
            leaf.prop_recursive(6, 64, 8, |inner| {
                prop_oneof![
                    prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                    prop::collection::vec((any::<String>(), inner), 0..8).prop_map(|members| Value::Object(members.into_iter().collect())),
                ]
            })
        }

        /// Equal as documents: numbers by value, so that `1.0` is `1`.
        fn same(a: &Value, b: &Value) -> bool {
            match (a, b) {
                (Value::Number(a), Value::Number(b)) => {
                    a == b || (a.is_f64() != b.is_f64() && a.as_f64() == b.as_f64()) || a.as_f64() == Some(0.0) && b.as_f64() == Some(0.0)
                }
                (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
                (Value::Object(a), Value::Object(b)) => a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b))),
                (a, b) => a == b,
            }
        }

        proptest! {
            #[test]
            fn canonical_text_means_the_same_and_is_stable(value in value()) {
                for text in [serde_json::to_string(&value).unwrap(), serde_json::to_string_pretty(&value).unwrap()] {
                    let json = Json::canonical(text.as_bytes()).unwrap();
                    prop_assert!(same(&value, &json.parse().unwrap()), "{text} became {json}");
                    prop_assert_eq!(&Json::canonical(json.as_str().as_bytes()).unwrap(), &json);
                }
            }

            #[test]
            fn whatever_is_accepted_is_json(bytes in prop::collection::vec(prop::sample::select(b"{}[]\":,\\u0d8eE+-.19 tfn\xc3\xa9".to_vec()), 0..40)) {
                if let Ok(json) = Json::canonical(&bytes) {
                    let ours: Value = json.parse().unwrap();
                    prop_assert!(same(&serde_json::from_slice(&bytes).unwrap(), &ours));
                }
            }
        }
    }
}
