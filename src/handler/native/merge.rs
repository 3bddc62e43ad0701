//! Keeps the members of a stored state that a handler's type does not know.

use crate::core::Json;
use serde_json::Value;

/// The state after a command, with what the handler's type does not know as it was stored.
///
/// `known` is the stored state as the type writes it, `after` what it writes after the command. What is in `stored` and
/// not in `known` is unknown, and kept; what is in `known` and not in `after` was removed. Elements of arrays have no
/// names: one keeps its unknown members where the command left it as it was, at its place. Where the type cannot read the result
/// (`is_readable`), such as for a renamed member with an alias, `after` is all there is.
pub fn keep_unknown(stored: &Json, known: &Json, after: Json, is_readable: impl Fn(&Json) -> bool) -> Result<Json, String> {
    if stored == known {
        return Ok(after);
    }
    if *known == after {
        return Ok(stored.clone());
    }
    let parse = |json: &Json| json.parse::<Value>().map_err(|error| error.to_string());
    let mut merged = parse(&after)?;
    merge(&parse(stored)?, &parse(known)?, &mut merged);
    let merged = Json::from_serialize(&merged)?;
    Ok(if is_readable(&merged) { merged } else { after })
}

fn merge(stored: &Value, known: &Value, after: &mut Value) {
    if known == after {
        stored.clone_into(after);
        return;
    }
    match (stored, known, after) {
        (Value::Object(stored), Value::Object(known), Value::Object(after)) => {
            for (key, stored) in stored {
                match (known.get(key), after.get_mut(key)) {
                    (None, None) => {
                        after.insert(key.clone(), stored.clone());
                    }
                    (Some(known), Some(after)) => merge(stored, known, after),
                    (None, Some(_)) | (Some(_), None) => {}
                }
            }
        }
        (Value::Array(stored), Value::Array(known), Value::Array(after)) => {
            for ((stored, known), after) in stored.iter().zip(known).zip(after) {
                if known == after {
                    stored.clone_into(after);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Json {
        Json::canonical(text.as_bytes()).unwrap()
    }

    #[test]
    fn unknown_members_stay_and_removed_ones_go() {
        for (stored, known, after, expected) in [
            (r#"{"a":1}"#, r#"{"a":1}"#, r#"{"a":2}"#, r#"{"a":2}"#),
            (r#"{"a":1,"x":9}"#, r#"{"a":1}"#, r#"{"a":2}"#, r#"{"a":2,"x":9}"#),
            (r#"{"a":1,"x":9}"#, r#"{"a":1}"#, r#"{"a":1}"#, r#"{"a":1,"x":9}"#),
            (r#"{"a":1,"b":2,"x":9}"#, r#"{"a":1,"b":2}"#, r#"{"a":1}"#, r#"{"a":1,"x":9}"#),
            (r#"{"a":1}"#, r#"{"a":1,"d":0}"#, r#"{"a":2,"d":0}"#, r#"{"a":2,"d":0}"#),
            (r#"{"in":{"a":1,"x":9},"n":1}"#, r#"{"in":{"a":1},"n":1}"#, r#"{"in":{"a":2},"n":1}"#, r#"{"in":{"a":2,"x":9},"n":1}"#),
            (
                r#"{"l":[{"a":1,"x":8},{"a":2,"x":9}]}"#,
                r#"{"l":[{"a":1},{"a":2}]}"#,
                r#"{"l":[{"a":1},{"a":3},{"a":4}]}"#,
                r#"{"l":[{"a":1,"x":8},{"a":3},{"a":4}]}"#,
            ),
            (r#"{"a":null,"b":1}"#, r#"{"b":1}"#, r#"{"a":5,"b":1}"#, r#"{"a":5,"b":1}"#),
            (r#"{"a":1,"n":18446744073709551615}"#, r#"{"a":1}"#, r#"{"a":2}"#, r#"{"a":2,"n":18446744073709551615}"#),
        ] {
            let merged = keep_unknown(&json(stored), &json(known), json(after), |_| true).unwrap();
            assert_eq!(merged, json(expected), "{stored}");
        }
    }

    #[test]
    fn what_could_not_be_read_again_is_not_written() {
        let merged = keep_unknown(&json(r#"{"a":1,"x":9}"#), &json(r#"{"a":1}"#), json(r#"{"a":2}"#), |_| false);
        assert_eq!(merged, Ok(json(r#"{"a":2}"#)));
    }
}
