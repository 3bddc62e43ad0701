//! The entity types of `examples/`, built in: what a server without `entities.path` serves, wherever its binary lies.

/// The modules of the built-in entity types, as (file name, source text); the name is what messages show.
pub const ENTITIES: &[(&str, &str)] = &[
    ("account.js", include_str!("../examples/bank/entities/account.js")),
    ("message.js", include_str!("../examples/chat/entities/message.js")),
    ("red_packet.js", include_str!("../examples/red_packet/entities/red_packet.js")),
    ("room.js", include_str!("../examples/chat/entities/room.js")),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_entity_type_is_built_in() {
        let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
        let mut files = Vec::new();
        for example in std::fs::read_dir(examples).unwrap() {
            if let Ok(entities) = std::fs::read_dir(example.unwrap().path().join("entities")) {
                files.extend(entities.map(|file| file.unwrap().file_name().into_string().unwrap()));
            }
        }
        files.sort();
        assert_eq!(ENTITIES.iter().map(|(name, _)| *name).collect::<Vec<_>>(), files);
    }
}
