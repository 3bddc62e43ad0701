//! Where commands go and what they say, checked once and kept as bytes.

use super::{BenchError, CONNECTIONS_MAX, ENTITIES_MAX, Options};
use crate::core::{CommandName, EntityType, Json};
use std::io::Write;
use std::ops::Range;

/// How long an xid is.
pub(super) const ID_LENGTH: usize = 20;

/// The server, the command and the entities.
pub(super) struct Target {
    /// `host:port`, to connect to.
    pub address: String,
    /// What stands in `Host`.
    pub authority: String,
    /// The path before `/v1`; mostly empty.
    pub base: String,
    pub entity_type: EntityType,
    pub command: CommandName,
    pub request: Json,
    /// Fresh ids.
    pub entities: Vec<[u8; ID_LENGTH]>,
}

impl Target {
    pub fn new(options: &Options) -> Result<Target, BenchError> {
        let argument = |name: &str, problem: String| BenchError::Argument(format!("{name} {problem}"));
        let within = |name: &str, value: usize, max: usize| {
            if (1..=max).contains(&value) { Ok(()) } else { Err(argument(name, format!("is {value}; allowed: 1 to {max}"))) }
        };
        within("--connections", options.connections, CONNECTIONS_MAX)?;
        within("--entities", options.entities, ENTITIES_MAX)?;
        if options.duration.is_zero() {
            return Err(argument("--duration", "is 0; give a time such as 10s".into()));
        }
        let url = url::Url::parse(&options.url)
            .map_err(|error| argument("--url", format!("{:?} is no URL ({error}); give one such as http://127.0.0.1:9865", options.url)))?;
        let (host, port) = match (url.scheme(), url.host_str(), url.port_or_known_default()) {
            ("http", Some(host), Some(port)) => (host, port),
            ("https", ..) => return Err(argument("--url", "is https; bench speaks plain http, so point it at the server itself".into())),
            _ => return Err(argument("--url", format!("{:?} is no http URL; give one such as http://127.0.0.1:9865", options.url))),
        };
        let request = Json::canonical(options.request.as_bytes()).map_err(|error| argument("--request", format!("is no JSON: {error}")))?;
        let mut entities = vec![[0; ID_LENGTH]; options.entities];
        entities.iter_mut().for_each(fresh_id);
        Ok(Target {
            address: format!("{host}:{port}"),
            authority: url.port().map_or_else(|| host.to_string(), |port| format!("{host}:{port}")),
            base: url.path().trim_end_matches('/').to_string(),
            entity_type: EntityType::new(&options.entity_type).map_err(|error| argument("--type", format!("{:?}: {error}", options.entity_type)))?,
            command: CommandName::new(&options.command).map_err(|error| argument("--command", format!("{:?}: {error}", options.command)))?,
            request,
            entities,
        })
    }

    /// A request for one command, in which only the two ids change.
    pub fn template(&self) -> Template {
        let Target { authority, base, entity_type, command, request, .. } = self;
        Template::new(
            &format!("POST {base}/v1/entities/{entity_type}/"),
            &format!("/{command} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nIdempotency-Key: ", request.len()),
            &format!("\r\n\r\n{request}"),
        )
    }

    /// A line for one command of a bulk request.
    pub fn line_template(&self) -> Template {
        let Target { entity_type, command, request, .. } = self;
        Template::new(
            &format!("{{\"entity_type\":\"{entity_type}\",\"entity_id\":\""),
            &format!("\",\"command\":\"{command}\",\"command_id\":\""),
            &format!("\",\"request\":{request}}}\n"),
        )
    }
}

/// Writes a new xid; allocates nothing.
pub(super) fn fresh_id(id: &mut [u8; ID_LENGTH]) {
    let written = write!(&mut id[..], "{}", xid::new());
    debug_assert!(written.is_ok(), "an xid has {ID_LENGTH} characters");
}

/// Bytes with places for an entity id and a command id.
pub(super) struct Template {
    bytes: Vec<u8>,
    entity: Range<usize>,
    command: Range<usize>,
}

impl Template {
    fn new(before: &str, between: &str, after: &str) -> Template {
        let mut bytes = before.as_bytes().to_vec();
        let mut place = |text: &str| {
            let start = bytes.len();
            bytes.resize(start + ID_LENGTH, b'_');
            bytes.extend_from_slice(text.as_bytes());
            start..start + ID_LENGTH
        };
        let (entity, command) = (place(between), place(after));
        Template { bytes, entity, command }
    }

    /// The bytes with these ids.
    pub fn fill(&mut self, entity: &[u8; ID_LENGTH], command: &[u8; ID_LENGTH]) -> &[u8] {
        self.bytes[self.entity.clone()].copy_from_slice(entity);
        self.bytes[self.command.clone()].copy_from_slice(command);
        &self.bytes
    }

    /// How many bytes that is.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }
}
