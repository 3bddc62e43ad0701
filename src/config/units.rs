//! Values of settings that have a form of their own: sizes, and the storage URL with its secret.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A text that is never shown: neither by `quokka config` nor in the log.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Takes the text.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text, for whoever needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("")
    }
}

/// A number of bytes, written as `"64MB"`, `"1 MiB"` or a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

impl Size {
    /// A number of 1024 bytes.
    pub const fn kibibytes(count: u64) -> Size {
        Size(count << 10)
    }

    /// A number of 1024 × 1024 bytes.
    pub const fn mebibytes(count: u64) -> Size {
        Size(count << 20)
    }

    /// A number of 1024 × 1024 × 1024 bytes.
    pub const fn gibibytes(count: u64) -> Size {
        Size(count << 30)
    }

    /// A number of 1000 × 1000 bytes.
    pub const fn megabytes(count: u64) -> Size {
        Size(count * 1_000_000)
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The number of bytes, for lengths in memory.
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// In the largest unit that gives a whole number, so that it reads back as the same.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 1 << 30), ("GB", 1_000_000_000), ("MiB", 1 << 20), ("MB", 1_000_000), ("KiB", 1 << 10), ("KB", 1000)];
        match units.into_iter().find(|(_, bytes)| self.0 >= *bytes && self.0.is_multiple_of(*bytes)) {
            Some((unit, bytes)) => write!(f, "{} {unit}", self.0 / bytes),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        bytesize::ByteSize::deserialize(deserializer).map(|size| Size(size.as_u64()))
    }
}

/// A storage URL. Its password shows nowhere but in [`StorageUrl::expose`].
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct StorageUrl(String);

impl StorageUrl {
    /// From its text.
    pub fn new(url: impl Into<String>) -> StorageUrl {
        StorageUrl(url.into())
    }

    /// The text, password included.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

/// Without the password. A URL too broken to be read rather loses more than it shows too much.
impl fmt::Display for StorageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((scheme, rest)) = self.0.split_once("://") else { return f.write_str(&self.0) };
        let Some((user, host)) = rest.rsplit_once('@') else { return f.write_str(&self.0) };
        match user.split_once(':') {
            Some((user, _password)) => write!(f, "{scheme}://{user}:***@{host}"),
            None => f.write_str(&self.0),
        }
    }
}

impl fmt::Debug for StorageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl Serialize for StorageUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
