//! Reading the layers, and saying what is wrong with them: the key, the value, where it came from, what is allowed.
//!
//! [`RULES`] holds one rule for each key. A key without a rule cannot exist: a test compares the table with [`Config`].

use super::{Config, Election, Node, Secret, Size, StorageUrl, Topology};
use crate::core::NodeId;
use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use humantime_serde::re::humantime::format_duration;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most handler processes.
pub(super) const PROCESSES_MAX: usize = 256;

/// What starts the name of an environment variable that holds a setting.
const ENVIRONMENT_PREFIX: &str = "QUOKKA_";
const DEFAULTS: &str = "the defaults";
const COMMAND_LINE: &str = "the command line";

/// Which values a key may have.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    /// A whole number from, to.
    Count(u64, u64),
    /// A time from, to.
    Time(Duration, Duration),
    /// A size from, to.
    Bytes(Size, Size),
    /// One of these words.
    Word(&'static [&'static str]),
    /// A text that passes the check, and what is allowed in words.
    Text(fn(&str) -> bool, &'static str),
    /// A list of such texts.
    Texts(fn(&str) -> bool, &'static str),
    /// A list of nodes, in words.
    Nodes(&'static str),
}

use Rule::{Bytes, Count, Nodes, Text, Texts, Time, Word};

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

const fn s(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// Every key and its rule, in the order of `config/quokka.toml`.
pub(super) const RULES: &[(&str, Rule)] = &[
    ("listen", Text(is_address, "address:port, such as 127.0.0.1:9865 or 0.0.0.0:80")),
    ("storage.url", Text(is_storage_url, "mysql://user:password@host:port/database or sqlite:PATH")),
    ("storage.url_file", Text(is_given, "the path of a readable file")),
    ("storage.shards", Count(1, crate::core::ShardCount::MAX as u64)),
    ("storage.pool", Count(1, 1000)),
    ("storage.statement_timeout", Time(ms(100), s(600))),
    ("storage.retry_for", Time(s(0), s(600))),
    ("entities.path", Text(is_given, "the path of a folder")),
    ("commands.timeout", Time(ms(10), s(600))),
    ("commands.reuse", Word(&["replay", "refuse"])),
    ("commands.queue_max", Count(1, 1_000_000)),
    ("commands.batch_rows_max", Count(1, 10_000)),
    ("commands.batch_bytes_max", Bytes(Size::kibibytes(64), Size::mebibytes(8))),
    ("commands.bundle_max", Count(1, 10_000)),
    ("commands.cache_max", Bytes(Size::kibibytes(0), Size::gibibytes(1024))),
    ("handlers.time_limit", Time(ms(1), s(60))),
    ("handlers.memory_limit", Bytes(Size::megabytes(4), Size::gibibytes(4))),
    ("handlers.processes", Count(1, PROCESSES_MAX as u64)),
    ("limits.body_max", Bytes(Size::kibibytes(1), Size::mebibytes(4))),
    ("limits.document_max", Bytes(Size::kibibytes(1), Size::mebibytes(4))),
    ("limits.connections_max", Count(1, 1_000_000)),
    ("limits.header_timeout", Time(ms(100), s(600))),
    ("limits.header_bytes_max", Bytes(Size::kibibytes(8), Size::kibibytes(256))),
    ("limits.body_timeout", Time(ms(100), s(3600))),
    ("limits.idle_timeout", Time(ms(100), s(86_400))),
    ("feed.followers_max", Count(1, 1_000_000)),
    ("feed.memory_max", Bytes(Size::kibibytes(0), Size::gibibytes(1024))),
    ("feed.poll", Time(ms(10), s(60))),
    ("cluster.node", Text(is_node_name, "1 to 64 letters, digits, '.', '_' and '-'")),
    ("cluster.advertise", Text(is_node_url, "an http URL such as http://10.0.0.1:9865")),
    ("cluster.topology", Word(&["single", "static", "elected"])),
    ("cluster.election", Word(&["database", "etcd"])),
    ("cluster.etcd", Texts(is_node_url, "a list of http URLs such as [\"http://10.0.0.1:2379\"]")),
    ("cluster.etcd_user", Text(is_given, "a name")),
    ("cluster.etcd_password", Text(is_given, "a text")),
    ("cluster.etcd_password_file", Text(is_given, "the path of a readable file")),
    ("cluster.nodes", Nodes("a list such as [{ id = \"node-1\", url = \"http://10.0.0.1:9865\" }], each id once")),
    ("cluster.heartbeat", Time(ms(50), s(10))),
    ("cluster.forward_timeout", Time(ms(50), s(10))),
    ("shutdown.grace", Time(s(0), s(600))),
    ("log.format", Word(&["human", "json"])),
    ("log.level", Text(is_log_level, "error, warn, info, debug, trace, or directives such as info,quokka::store=debug")),
];

/// What is allowed, in words.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Count(from, to) => write!(f, "a whole number from {from} to {to}"),
            Time(from, to) => write!(f, "\"{}\" to \"{}\"", format_duration(*from), format_duration(*to)),
            Bytes(from, to) => write!(f, "\"{from}\" to \"{to}\""),
            Word(words) => write!(f, "\"{}\"", words.join("\" or \"")),
            Text(_, words) | Texts(_, words) | Nodes(words) => f.write_str(words),
        }
    }
}

impl Rule {
    fn allows(&self, figment: &Figment, key: &str) -> bool {
        match self {
            Count(from, to) => figment.extract_inner::<u64>(key).is_ok_and(|count| (from..=to).contains(&&count)),
            Time(from, to) => figment.extract_inner::<humantime_serde::Serde<Duration>>(key).is_ok_and(|time| (*from..=*to).contains(&time.into_inner())),
            Bytes(from, to) => figment.extract_inner::<Size>(key).is_ok_and(|size| (from..=to).contains(&&size)),
            Word(words) => figment.extract_inner::<String>(key).is_ok_and(|word| words.contains(&word.as_str())),
            Text(check, _) => figment.extract_inner::<String>(key).is_ok_and(|text| check(&text)),
            Texts(check, _) => figment.extract_inner::<Vec<String>>(key).is_ok_and(|texts| texts.iter().all(|text| check(text))),
            Nodes(_) => figment.extract_inner::<Vec<Node>>(key).is_ok_and(|nodes| {
                let ids: BTreeSet<&str> = nodes.iter().map(|node| node.id.as_str()).collect();
                ids.len() == nodes.len() && nodes.iter().all(|node| is_node_name(&node.id) && is_node_url(&node.url))
            }),
        }
    }
}

fn is_given(text: &str) -> bool {
    !text.is_empty()
}

fn is_address(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = if host.contains(':') { text.parse::<std::net::SocketAddr>().is_ok() } else { !host.is_empty() && !host.contains(['/', ' ']) };
        is_host && port.parse::<u16>().is_ok()
    })
}

fn is_storage_url(text: &str) -> bool {
    match text.split_once(':') {
        Some(("mysql", rest)) => rest.starts_with("//"),
        Some(("sqlite", path)) => !path.is_empty(),
        _ => false,
    }
}

fn is_node_name(text: &str) -> bool {
    NodeId::new(text).is_ok()
}

fn is_node_url(text: &str) -> bool {
    crate::cluster::peer::is_node_url(text)
}

fn is_log_level(text: &str) -> bool {
    // A lone word that is no level would be read as the name of a module, and silence everything else.
    let is_lone_word = |directive: &str| !directive.contains(['=', '[']);
    let is_level = |directive: &str| directive.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    let are_known = text.split(',').all(|directive| !is_lone_word(directive) || is_level(directive));
    !text.is_empty() && are_known && tracing_subscriber::EnvFilter::try_new(text).is_ok()
}

/// What the command line sets; the last layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    /// `listen`
    pub listen: Option<String>,
    /// `storage.url`
    pub storage: Option<String>,
    /// `entities.path`
    pub entities: Option<PathBuf>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The whole key, such as `storage.pool`; empty where a whole layer cannot be read.
    pub key: String,
    /// Where the value came from: a file, an environment variable, the command line.
    pub source: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() {
            return write!(f, "{}: {}", self.source, self.message);
        }
        write!(f, "{} (from {}): {}", self.key, self.source, self.message)
    }
}

/// All that is wrong with a configuration; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(pub Vec<Problem>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the configuration cannot be used:")?;
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for ConfigError {}

/// One source of settings.
struct Layer {
    name: String,
    settings: Dict,
}

impl Provider for &Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.name.clone())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.settings.clone()))
    }
}

/// Reads the file, the process's environment and the command line.
pub fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Config, ConfigError> {
    // A variable that is not valid Unicode cannot hold a setting; its name alone decides whether it is meant to.
    let environment = std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    load_from(file, environment, overrides)
}

/// As [`load`], with the environment given.
pub fn load_from(file: Option<&Path>, environment: impl IntoIterator<Item = (String, String)>, overrides: &Overrides) -> Result<Config, ConfigError> {
    let known = known_keys();
    let mut problems = Vec::new();
    let mut layers = Vec::new();
    match file.map(read_file).transpose() {
        Ok(layer) => layers.extend(layer),
        Err(problem) => problems.push(problem),
    }
    layers.extend(environment_layers(environment, &known));
    layers.push(command_line_layer(overrides));
    for layer in &layers {
        find_unknown(&layer.name, "", &layer.settings, &known, &mut problems);
    }
    let figment = layers.iter().fold(Figment::from(defaults()), |figment, layer| figment.merge(layer));
    for (key, rule) in RULES {
        let value = figment.find_value(key).ok().filter(|value| value.to_empty().is_none());
        if let Some(value) = value
            && !rule.allows(&figment, key)
        {
            let source = figment.find_metadata(key).map_or_else(|| DEFAULTS.into(), |metadata| metadata.name.to_string());
            problems.push(Problem { key: (*key).into(), source, message: format!("is {}; allowed: {rule}", shown(&value)) });
        }
    }
    if !problems.is_empty() {
        return Err(ConfigError(problems));
    }
    let config = figment
        .extract()
        .map_err(|error| ConfigError(vec![Problem { key: error.path.join("."), source: "all layers".into(), message: error.kind.to_string() }]))?;
    finish(config, &layers)
}

fn defaults() -> Serialized<Config> {
    Serialized::defaults(Config::default())
}

/// The tree of all keys: what the defaults hold, unset ones included.
fn known_keys() -> Dict {
    defaults().data().ok().and_then(|mut profiles| profiles.remove(&Profile::Default)).unwrap_or_default()
}

fn read_file(path: &Path) -> Result<Layer, Problem> {
    let name = path.display().to_string();
    let fail = |message: String| Problem { key: String::new(), source: name.clone(), message };
    let text = std::fs::read_to_string(path).map_err(|error| fail(format!("the configuration file cannot be read: {error}")))?;
    let settings = Toml::from_str::<Dict>(&text).map_err(|error| fail(error.to_string().trim_end().to_string()))?;
    Ok(Layer { name, settings })
}

/// One layer a variable, so that each is named where it is wrong.
fn environment_layers(environment: impl IntoIterator<Item = (String, String)>, known: &Dict) -> Vec<Layer> {
    let mut layers: Vec<Layer> = environment
        .into_iter()
        .filter_map(|(name, value)| {
            let key = name.strip_prefix(ENVIRONMENT_PREFIX)?;
            if key.is_empty() || is_service_link(&name) {
                return None;
            }
            let path: Vec<String> = key.split("__").map(str::to_ascii_lowercase).collect();
            let value = match known_value(known, &path) {
                Some(Value::Array(..)) => list(&value),
                Some(Value::Num(..) | Value::Bool(..)) => value.trim().parse::<Value>().unwrap_or_else(|never| match never {}),
                _ => Value::from(value),
            };
            let settings = path.iter().rev().fold(value, |value, part| Value::from(Dict::from([(part.clone(), value)]))).into_dict()?;
            Some(Layer { name: format!("the environment variable {name}"), settings })
        })
        .collect();
    layers.sort_by(|a, b| a.name.cmp(&b.name));
    layers
}

/// A list in a variable: as in the file, or texts with commas between.
fn list(text: &str) -> Value {
    let texts = || text.split(',').map(str::trim).filter(|text| !text.is_empty()).map(Value::from).collect::<Vec<Value>>().into();
    match text.trim().starts_with('[') {
        true => Toml::from_str::<Dict>(&format!("list = {text}")).ok().and_then(|mut parsed| parsed.remove("list")).unwrap_or_else(|| Value::from(text)),
        false => texts(),
    }
}

/// Kubernetes gives every container variables that describe the services around it, such as `QUOKKA_SERVICE_HOST` and
/// `QUOKKA_PORT_9865_TCP_ADDR` for a service named quokka. They are no settings.
fn is_service_link(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.split_once("_PORT_").is_some_and(|(_, rest)| rest.starts_with(|first: char| first.is_ascii_digit()))
}

fn known_value<'a>(known: &'a Dict, path: &[String]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let value = known.get(first)?;
    if rest.is_empty() { Some(value) } else { known_value(value.as_dict()?, rest) }
}

fn command_line_layer(overrides: &Overrides) -> Layer {
    let mut settings = Dict::new();
    let mut set = |section: &str, key: &str, value: Option<String>| {
        if let Some(value) = value {
            settings.insert(section.into(), Dict::from([(key.to_string(), Value::from(value))]).into());
        }
    };
    set("storage", "url", overrides.storage.clone());
    set("entities", "path", overrides.entities.as_ref().map(|path| path.display().to_string()));
    if let Some(listen) = &overrides.listen {
        settings.insert("listen".into(), Value::from(listen.clone()));
    }
    Layer { name: COMMAND_LINE.into(), settings }
}

fn find_unknown(source: &str, above: &str, settings: &Dict, known: &Dict, problems: &mut Vec<Problem>) {
    for (name, value) in settings {
        let key = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        let problem = |message: String| Problem { key: key.clone(), source: source.into(), message };
        match (known.get(name), value) {
            (None, _) => problems.push(problem(match nearest(&key) {
                Some(known) => format!("there is no such key; did you mean {known}?"),
                None => "there is no such key; `quokka config` prints all that there are".into(),
            })),
            (Some(Value::Dict(_, known)), Value::Dict(_, settings)) => find_unknown(source, &key, settings, known, problems),
            (Some(Value::Dict(..)), _) => problems.push(problem(format!("is a section, not a value: set its keys, such as {}", first_below(&key)))),
            (Some(_), Value::Dict(..)) => problems.push(problem("is a value, not a section".into())),
            (Some(_), _) => {}
        }
    }
}

fn first_below(section: &str) -> &'static str {
    RULES.iter().map(|(key, _)| *key).find(|key| key.split_once('.').is_some_and(|(above, _)| above == section)).unwrap_or_default()
}

/// The known key that the user most likely meant: the same but for separators or the section, or a few letters away.
fn nearest(key: &str) -> Option<&'static str> {
    let squeeze = |key: &str| key.replace(['_', '.', '-'], "");
    let name = key.rsplit('.').next().unwrap_or(key);
    let keys = || RULES.iter().map(|(key, _)| *key);
    keys()
        .find(|known| squeeze(known) == squeeze(key))
        .or_else(|| keys().find(|known| known.rsplit('.').next() == Some(name)))
        .or_else(|| keys().map(|known| (edit_distance(known, key), known)).min().filter(|(distance, _)| *distance <= 2).map(|(_, known)| known))
}

fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (at, letter) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in b.bytes().enumerate() {
            let cost = diagonal + usize::from(letter != other);
            diagonal = row[column + 1];
            row[column + 1] = cost.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[b.len()]
}

/// A value as its owner would recognize it; of a URL without the password.
fn shown(value: &Value) -> String {
    match value {
        Value::String(_, text) => format!("{:?}", StorageUrl::new(text.clone())),
        other => serde_json::to_string(other).unwrap_or_else(|_| "something else".into()),
    }
}

/// What spans several keys, and the URL that stands in a file.
fn finish(mut config: Config, layers: &[Layer]) -> Result<Config, ConfigError> {
    let mut problems = Vec::new();
    let mut refuse = |key: &str, source: &str, message: String| problems.push(Problem { key: key.into(), source: source.into(), message });
    let sets = |layer: &Layer, key: &str| layer.settings.get("storage").and_then(|storage| storage.as_dict()).is_some_and(|storage| storage.contains_key(key));
    let rank = |key: &str| layers.iter().rposition(|layer| sets(layer, key)).map(|at| (layer_rank(&layers[at]), at));
    if let Some(path) = &config.storage.url_file {
        let (url, file) = (rank("url"), rank("url_file"));
        let source = file.map_or(DEFAULTS, |(_, at)| &layers[at].name);
        match (url, file) {
            (Some((url, _)), Some((file, _))) if url == file => {
                refuse("storage.url_file", source, "storage.url is set beside it; give one of the two".into());
            }
            (Some((url, _)), Some((file, _))) if url > file => config.storage.url_file = None,
            _ => match std::fs::read_to_string(path).map(|text| text.trim().to_string()) {
                Ok(url) if is_storage_url(&url) => config.storage.url = StorageUrl::new(url),
                Ok(_) => refuse(
                    "storage.url_file",
                    source,
                    format!("{} holds no storage URL: mysql://user:password@host:port/database or sqlite:PATH", path.display()),
                ),
                Err(error) => refuse("storage.url_file", source, format!("{} cannot be read: {error}", path.display())),
            },
        }
    }
    if config.limits.document_max < config.limits.body_max {
        let message = format!(
            "is {}, less than limits.body_max ({}): a request must fit into the event that it makes",
            config.limits.document_max, config.limits.body_max
        );
        refuse("limits.document_max", "all layers together", message);
    }
    if config.storage.retry_for > config.commands.timeout {
        let message = "is longer than commands.timeout: callers would have gone before they are told".to_string();
        refuse("storage.retry_for", "all layers together", message);
    }
    finish_cluster(&mut config, &mut refuse);
    if problems.is_empty() { Ok(config) } else { Err(ConfigError(problems)) }
}

/// What spans several keys of `[cluster]`, and the password that stands in a file.
fn finish_cluster(config: &mut Config, refuse: &mut impl FnMut(&str, &str, String)) {
    const TOGETHER: &str = "all layers together";
    let cluster = &mut config.cluster;
    if let Some(path) = &cluster.etcd_password_file {
        match std::fs::read_to_string(path) {
            Ok(_) if cluster.etcd_password.is_some() => {
                refuse("cluster.etcd_password_file", TOGETHER, "cluster.etcd_password is set beside it; give one of the two".into())
            }
            Ok(text) => cluster.etcd_password = Some(Secret::new(text.trim())),
            Err(error) => refuse("cluster.etcd_password_file", TOGETHER, format!("{} cannot be read: {error}", path.display())),
        }
    }
    if cluster.etcd_user.is_some() != cluster.etcd_password.is_some() {
        refuse("cluster.etcd_user", TOGETHER, "and the password go together: give both or none".into());
    }
    if cluster.topology == Topology::Static && cluster.nodes.is_empty() {
        refuse("cluster.nodes", TOGETHER, "is empty, and cluster.topology is \"static\": name all nodes".into());
    }
    if cluster.topology == Topology::Elected && cluster.election == Election::Etcd {
        if cluster.etcd.is_empty() {
            refuse("cluster.etcd", TOGETHER, "is empty, and cluster.election is \"etcd\": name its endpoints".into());
        }
        if !cfg!(feature = "etcd") {
            refuse(
                "cluster.election",
                TOGETHER,
                "is \"etcd\", and this program was built without it: build it with --features etcd, or let the \"database\" elect".into(),
            );
        }
    }
    let is_everywhere = |listen: &str| listen.rsplit_once(':').is_some_and(|(host, _)| matches!(host, "0.0.0.0" | "[::]"));
    if cluster.topology == Topology::Elected && cluster.advertise.is_none() && is_everywhere(&config.listen) {
        let message = format!("is not set, and others cannot reach this node at {}: name the URL that they can use", config.listen);
        refuse("cluster.advertise", TOGETHER, message);
    }
}

/// Which layer of the four a source belongs to: all environment variables are one.
fn layer_rank(layer: &Layer) -> u8 {
    match layer.name.as_str() {
        COMMAND_LINE => 3,
        name if name.starts_with("the environment variable ") => 2,
        _ => 1,
    }
}
