use super::*;
use proptest::prelude::*;
use rquickjs::{Context, Runtime};

/// Runs `with` on a realm with the engine's bare objects and a function that unwraps nothing.
fn realm<T>(with: impl FnOnce(&Ctx<'_>, &mut dyn FnMut(Value<'_>) -> String) -> T) -> T {
    let runtime = Runtime::new().unwrap();
    let context = Context::full(&runtime).unwrap();
    context.with(|ctx| {
        let unbox: Function<'_> = ctx.eval("(value) => value").unwrap();
        let plain: Object<'_> = ctx.eval("Object.prototype").unwrap();
        let mut write = |value: Value<'_>| {
            let mut out = String::new();
            // The one context there is; the compiler cannot know.
            let value = rquickjs::Persistent::save(&value.ctx().clone(), value).restore(&ctx).unwrap();
            let never = || false;
            let mut writer = Writer { unbox: &unbox, plain: &plain, unwrap: None, out: &mut out, bytes_max: 1 << 20, is_overrun: &never };
            match writer.document(value) {
                Ok(()) => out,
                Err(error) => format!("{error:?}"),
            }
        };
        with(&ctx, &mut write)
    })
}

/// A text into a JavaScript value and back.
fn round_trip(texts: &[String]) -> Vec<String> {
    realm(|ctx, write| texts.iter().map(|text| write(to_js(ctx, &Json::trusted(text.clone())).unwrap())).collect())
}

#[test]
fn canonical_texts_come_back_as_they_were() {
    let texts = [
        "null",
        "true",
        "\"\"",
        "\"é😀\\u0000\\n\u{7f}\u{2028}\"",
        "0",
        "-1",
        "9007199254740991",
        "9007199254740992",
        "9007199254740993",
        "-9007199254740993",
        "18446744073709551615",
        "-9223372036854775808",
        "9007199254740992.0",
        "1e20",
        "1e308",
        "5e-324",
        "1.5777777777770001",
        "117.63331139400017",
        "[1000000000000000,\"9007199254740993\",{\"a\":9007199254740993}]",
        "{\"__proto__\":1,\"constructor\":{\"__proto__\":null},\"toString\":2}",
        "{\"__proto__\":18446744073709551615,\"hasOwnProperty\":[18446744073709551614]}",
        "{\"1\":1,\"10\":2,\"2\":3,\"\":4,\"\\u0000\":5}",
        "{\"\u{ffff}\":1,\"😀\":2}",
    ]
    .map(|text| {
        // Keys must be in their order.
        Json::canonical(text.as_bytes()).unwrap().to_string()
    });
    assert_eq!(round_trip(&texts), texts);
    let deep = "[".repeat(DEPTH_MAX) + &"]".repeat(DEPTH_MAX);
    assert_eq!(round_trip(std::slice::from_ref(&deep)), [deep]);
}

#[test]
fn long_numbers_are_found() {
    for (text, found) in [
        ("", false),
        ("123456789012345", false),
        ("1234567890123456", true),
        ("[1,2,3,123456789012345,123456789012345]", false),
        ("              1234567890123456", true),
        ("\"1234567890123456\"", true),
        ("0.123456789012345", false),
    ] {
        assert_eq!(has_long_number(text.as_bytes()), found, "{text}");
    }
}

proptest! {
    #[test]
    fn long_numbers_are_found_wherever_they_are(before in 0..40_usize, digits in 1..40_usize, after in 0..40_usize) {
        let text = " ".repeat(before) + &"7".repeat(digits) + &" ".repeat(after);
        prop_assert_eq!(has_long_number(text.as_bytes()), digits >= 16);
    }
}

fn document() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::Value;
    let key = prop_oneof![any::<String>(), prop::sample::select(vec!["__proto__", "constructor", "toString", "1", "10", "length"]).prop_map(str::to_owned)];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6).prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_document_comes_back(documents in prop::collection::vec(document(), 1..8)) {
        let texts: Vec<String> = documents.iter().map(|document| Json::from_serialize(document).unwrap().to_string()).collect();
        prop_assert_eq!(round_trip(&texts), texts);
    }
}
