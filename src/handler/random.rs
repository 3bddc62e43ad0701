//! Random numbers that a command gets again when it is run again.
//!
//! The sequence depends on a secret of the database and on the command's identity alone, so it is the same on every node and
//! in every release, and nobody outside can foretell it. It must never change.

use crate::core::{CommandId, EntityId, EntityType, LogIdentity};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// The secret from which commands get their random numbers; made from the database's.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomKey([u8; 32]);

impl RandomKey {
    /// The key of a database.
    pub fn of(log: &LogIdentity) -> RandomKey {
        RandomKey(log.derive("handlers", &[b"random"]))
    }

    /// The random numbers of one command.
    pub fn dice(&self, entity_type: &EntityType, entity_id: &EntityId, command_id: &CommandId) -> Dice {
        let parts = [entity_type.as_str().as_bytes(), entity_id.as_str().as_bytes(), command_id.as_str().as_bytes()];
        Dice(Xoshiro256PlusPlus::from_seed(LogIdentity::new(self.0).derive("random", &parts)))
    }
}

/// Shows nothing of the secret.
impl std::fmt::Debug for RandomKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RandomKey(..)")
    }
}

/// A command's sequence of random numbers: xoshiro256++.
#[derive(Debug, Clone)]
pub struct Dice(Xoshiro256PlusPlus);

impl Dice {
    /// The next number, at least 0 and below 1, with 53 bits.
    pub fn next_unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(secret: u8, entity_type: &str, id: &str, command: &str) -> [f64; 2] {
        let key = RandomKey::of(&LogIdentity::new([secret; 32]));
        let mut dice = key.dice(&EntityType::trusted(entity_type), &EntityId::trusted(id), &CommandId::trusted(command));
        [dice.next_unit(), dice.next_unit()]
    }

    #[test]
    fn the_sequence_is_the_one_that_states_were_made_with() {
        assert_eq!(first(7, "account", "a", "c-1"), PINNED);
    }

    /// Computed independently, from the definitions of SHA-256 and xoshiro256++.
    const PINNED: [f64; 2] = [0.4865196421858069, 0.8626471901523732];

    #[test]
    fn every_part_of_the_identity_counts() {
        let all = [
            first(7, "account", "a", "c-1"),
            first(8, "account", "a", "c-1"),
            first(7, "accounta", "", "c-1"),
            first(7, "account", "b", "c-1"),
            first(7, "account", "a", "c-2"),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|other| other != one));
            assert!(one.iter().all(|number| (0.0..1.0).contains(number)));
        }
    }
}
