//! Tokens of the feed: cuts through the log, given to readers and taken back.
//!
//! A [`Cut`] says for some partitions how far they were read. What is above it comes next when the feed is read forwards, what is not above it when it
//! is read backwards. Like the tokens in [`super::token`], it carries a keyed check, so that a forged one and one of another database are told apart
//! from a good one; readers keep tokens, so a format that was once given out must never change.
//!
//! Size: a varint a partition, runs of untouched partitions in two bytes. At 64 shards and millions of events in each that is under 400
//! characters for one entity type; it grows with the number of types and shards.

use super::ids::{EntityId, EntityType, Version};
use super::token::{LogIdentity, Position, TokenError, seal, unseal};
use std::collections::BTreeMap;

const FORMAT_TYPES: u8 = 2;
const FORMAT_ENTITY: u8 = 3;

/// The longest token that is looked at.
pub const TOKEN_LEN_MAX: usize = 128 * 1024;

/// How far the partitions of some entity types were read: for each type the event id last passed in each shard, in the order of shards.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TypesCut {
    /// The positions of each type, all of the same length.
    pub positions: BTreeMap<EntityType, Vec<u64>>,
    /// With which of the partitions, counted through all types, the next page begins; so that none waits for ever behind a busy one.
    pub turn: u32,
}

/// How far one entity was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntityCut {
    /// Its type.
    pub entity_type: EntityType,
    /// Its id.
    pub entity_id: EntityId,
    /// The version last passed.
    pub version: Version,
    /// The event id of its partition that was last passed; at or after that version's.
    pub event_id: u64,
}

/// Any token that is a `since`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Right after the event of a command's answer.
    Answer(Position),
    /// Of a feed of entity types.
    Types(TypesCut),
    /// Of a feed of one entity.
    Entity(EntityCut),
}

impl TypesCut {
    /// The least cut that has passed all these positions: what the token of a bundle's answer stands for.
    pub fn through<'a>(positions: impl IntoIterator<Item = &'a Position>, shards: usize) -> TypesCut {
        let mut cut = TypesCut::default();
        for Position { partition, event_id } in positions {
            let of_type = cut.positions.entry(partition.entity_type.clone()).or_insert_with(|| vec![0; shards]);
            if let Some(passed) = of_type.get_mut(usize::from(partition.shard.0)) {
                *passed = (*passed).max(*event_id);
            }
        }
        cut
    }

    /// The cut as a token.
    pub fn token(&self, log: &LogIdentity) -> String {
        let mut content = vec![FORMAT_TYPES];
        put(&mut content, self.turn.into());
        for (entity_type, positions) in &self.positions {
            put_text(&mut content, entity_type.as_str());
            put(&mut content, positions.len() as u64);
            let mut rest = positions.as_slice();
            while let Some((position, after)) = rest.split_first() {
                put(&mut content, *position);
                rest = after;
                if *position == 0 {
                    let more = rest.iter().take_while(|position| **position == 0).count();
                    put(&mut content, more as u64);
                    rest = &rest[more..];
                }
            }
        }
        seal(log, content)
    }

    fn parse(mut content: &[u8], shards: usize) -> Option<TypesCut> {
        let turn = u32::try_from(take(&mut content)?).ok()?;
        let mut positions = BTreeMap::new();
        while !content.is_empty() {
            let entity_type = EntityType::new(take_text(&mut content)?).ok()?;
            let count = usize::try_from(take(&mut content)?).ok().filter(|count| *count == shards)?;
            let mut read = Vec::with_capacity(count);
            while read.len() < count {
                let position = take(&mut content)?;
                read.push(position);
                if position == 0 {
                    let more = usize::try_from(take(&mut content)?).ok().filter(|more| *more <= count - read.len())?;
                    read.resize(read.len() + more, 0);
                }
            }
            positions.insert(entity_type, read);
        }
        Some(TypesCut { positions, turn })
    }
}

impl EntityCut {
    /// The cut as a token.
    pub fn token(&self, log: &LogIdentity) -> String {
        let mut content = vec![FORMAT_ENTITY];
        put_text(&mut content, self.entity_type.as_str());
        put_text(&mut content, self.entity_id.as_str());
        put(&mut content, self.version);
        put(&mut content, self.event_id);
        seal(log, content)
    }

    fn parse(mut content: &[u8]) -> Option<EntityCut> {
        let entity_type = EntityType::new(take_text(&mut content)?).ok()?;
        let entity_id = EntityId::new(take_text(&mut content)?, super::ids::ENTITY_ID_LIMIT).ok()?;
        let (version, event_id) = (take(&mut content)?, take(&mut content)?);
        content.is_empty().then_some(EntityCut { entity_type, entity_id, version, event_id })
    }
}

impl Cut {
    /// Reads a token that this log gave out; `shards` is the number of shards of the database.
    pub fn read(token: &str, log: &LogIdentity, shards: usize) -> Result<Cut, TokenError> {
        if token.len() > TOKEN_LEN_MAX {
            return Err(TokenError);
        }
        let content = unseal(token, log).ok_or(TokenError)?;
        let cut = match content.split_first() {
            Some((&FORMAT_TYPES, rest)) => TypesCut::parse(rest, shards).map(Cut::Types),
            Some((&FORMAT_ENTITY, rest)) => EntityCut::parse(rest).map(Cut::Entity),
            Some(_) | None => Position::read(token, log).ok().map(Cut::Answer),
        };
        cut.ok_or(TokenError)
    }
}

/// LEB128: seven bits a byte, lowest first.
fn put(content: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        content.push(number as u8 | 0x80);
        number >>= 7;
    }
    content.push(number as u8);
}

fn put_text(content: &mut Vec<u8>, text: &str) {
    put(content, text.len() as u64);
    content.extend_from_slice(text.as_bytes());
}

fn take(content: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = content.split_first()?;
        *content = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn take_text<'c>(content: &mut &'c [u8]) -> Option<&'c str> {
    let length = usize::try_from(take(content)?).ok()?;
    let (text, rest) = content.split_at_checked(length)?;
    *content = rest;
    std::str::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Partition, ShardId};
    use proptest::prelude::*;

    fn log() -> LogIdentity {
        LogIdentity::new([7; 32])
    }

    fn cut(types: &[(&str, Vec<u64>)], turn: u32) -> TypesCut {
        TypesCut { positions: types.iter().map(|(name, positions)| (EntityType::trusted(name), positions.clone())).collect(), turn }
    }

    #[test]
    fn formats_are_those_that_readers_hold() {
        let types = cut(&[("account", vec![0, 0, 0, 300, 7])], 2);
        assert!(types.token(&log()).starts_with("s_AgIHYWNjb3VudAUAAqwCB"), "{}", types.token(&log()));
        let entity = EntityCut { entity_type: EntityType::trusted("account"), entity_id: EntityId::trusted("a1"), version: 3, event_id: 300 };
        assert!(entity.token(&log()).starts_with("s_AwdhY2NvdW50AmExA6wC"), "{}", entity.token(&log()));
        let position = Position { partition: Partition { entity_type: EntityType::trusted("account"), shard: ShardId(3) }, event_id: 9 };
        assert_eq!(Cut::read(&position.token(&log()), &log(), 64), Ok(Cut::Answer(position)));
    }

    #[test]
    fn tokens_are_short() {
        for (types, length_max) in [
            (cut(&[("account", vec![0; 64])], 0), 40),
            (cut(&[("account", vec![2_000_000; 64])], 63), 300),
            (cut(&[("account", vec![200_000_000; 64])], 63), 400),
            (cut(&[("account", vec![2_000_000; 64]), ("transfer", vec![0; 64])], 127), 320),
        ] {
            let token = types.token(&log());
            assert!(token.len() < length_max, "{} {token}", token.len());
            assert_eq!(Cut::read(&token, &log(), 64), Ok(Cut::Types(types)));
        }
    }

    #[test]
    fn what_is_no_token_of_this_log_is_refused() {
        let token = cut(&[("account", vec![5; 64])], 0).token(&log());
        for (text, shards) in [("", 64), ("s_", 64), ("now", 64), ("s_AAAA", 64), (&token[..token.len() - 1], 64), (&token, 32), (&*"s_A".repeat(60_000), 64)] {
            assert_eq!(Cut::read(text, &log(), shards), Err(TokenError), "{text:.20} {shards}");
        }
    }

    fn positions() -> impl Strategy<Value = Vec<u64>> {
        proptest::collection::vec(prop_oneof![Just(0), 0..300_u64, any::<u64>()], 64)
    }

    proptest! {
        #[test]
        fn cuts_read_back(types in proptest::collection::btree_map("[a-p][a-z0-9_]{0,47}", positions(), 0..5), turn in any::<u32>()) {
            let positions = types.into_iter().map(|(name, positions)| (EntityType::trusted(&name), positions)).collect();
            let cut = TypesCut { positions, turn };
            prop_assert_eq!(Cut::read(&cut.token(&log()), &log(), 64), Ok(Cut::Types(cut)));
        }

        #[test]
        fn entity_cuts_read_back(name in "[a-p][a-z0-9_]{0,47}", id in "[0-9A-Za-z_-]{1,64}", version in any::<u64>(), event_id in any::<u64>()) {
            let cut = EntityCut { entity_type: EntityType::trusted(&name), entity_id: EntityId::trusted(&id), version, event_id };
            prop_assert_eq!(Cut::read(&cut.token(&log()), &log(), 64), Ok(Cut::Entity(cut)));
        }

        #[test]
        fn changed_and_foreign_tokens_are_refused(positions in positions(), at in any::<prop::sample::Index>(), letter in "[A-Za-z0-9_-]") {
            let token = cut(&[("account", positions)], 0).token(&log());
            prop_assert_eq!(Cut::read(&token, &LogIdentity::new([8; 32]), 64), Err(TokenError));
            let at = 2 + at.index(token.len() - 2);
            let mut forged = token.clone();
            forged.replace_range(at..at + 1, &letter);
            prop_assume!(forged != token);
            prop_assert_eq!(Cut::read(&forged, &log(), 64), Err(TokenError));
        }

        #[test]
        fn nonsense_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = TypesCut::parse(&bytes, 64);
            let _ = EntityCut::parse(&bytes);
        }
    }
}
