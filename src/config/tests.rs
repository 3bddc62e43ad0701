use super::load::RULES;
use super::*;
use std::path::Path;

const FILE: &str = include_str!("../../config/quokka.toml");

/// Loads a file of this text, these variables and these overrides; what is wrong, one line each.
fn loaded(file: &str, environment: &[(&str, &str)], overrides: &Overrides) -> Result<Config, Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quokka.toml");
    std::fs::write(&path, file).unwrap();
    let environment = environment.iter().map(|(name, value)| ((*name).to_string(), (*value).to_string()));
    load_from(Some(&path), environment, overrides).map_err(|error| {
        let short = |problem: &Problem| problem.to_string().replace(&path.display().to_string(), "FILE");
        error.0.iter().map(short).collect()
    })
}

fn from_file(file: &str) -> Result<Config, Vec<String>> {
    loaded(file, &[], &Overrides::default())
}

fn from_environment(name: &str, value: &str) -> Result<Config, Vec<String>> {
    loaded("", &[(name, value)], &Overrides::default())
}

#[test]
fn the_example_file_holds_exactly_the_defaults() {
    assert_eq!(from_file(FILE), Ok(Config::default()));
}

#[test]
fn the_example_file_shows_every_key_with_what_is_allowed() {
    let mut section = String::new();
    let mut comment = String::new();
    let mut shown = Vec::new();
    for line in FILE.lines() {
        let setting = line.strip_prefix("# ").unwrap_or(line);
        if let Some(name) = line.strip_prefix('[') {
            section = format!("{}.", name.trim_end_matches(']'));
        } else if let Some((name, _)) = setting.split_once(" = ").filter(|(name, _)| !name.contains(' ')) {
            shown.push((format!("{section}{name}"), std::mem::take(&mut comment)));
        } else if line.is_empty() {
            comment.clear();
        } else {
            comment.push_str(setting);
            comment.push(' ');
        }
    }
    assert_eq!(shown.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), RULES.iter().map(|(key, _)| *key).collect::<Vec<_>>());
    for ((key, comment), (_, rule)) in shown.iter().zip(RULES) {
        assert!(comment.contains(&rule.to_string()), "{key}: the comment does not say what is allowed: {rule}");
    }
}

#[test]
fn every_setting_has_a_rule() {
    let serialized = figment::value::Value::serialize(Config::default()).unwrap();
    let mut keys = Vec::new();
    for (name, value) in serialized.into_dict().unwrap() {
        match value.into_dict() {
            None => keys.push(name),
            Some(section) => keys.extend(section.keys().map(|key| format!("{name}.{key}"))),
        }
    }
    let mut rules: Vec<_> = RULES.iter().map(|(key, _)| (*key).to_string()).collect();
    rules.sort();
    keys.sort();
    assert_eq!(keys, rules);
}

#[test]
fn later_layers_win_key_by_key() {
    let file = "listen = \"127.0.0.1:1\"\n[storage]\nurl = \"sqlite:file\"\npool = 3\n[handlers]\ntime_limit = \"1s\"\nmemory_limit = \"16 MiB\"";
    let environment = [("QUOKKA_STORAGE__POOL", "4"), ("QUOKKA_STORAGE__URL", "sqlite:environment"), ("QUOKKA_HANDLERS__MEMORY_LIMIT", "8388608")];
    let overrides = Overrides { storage: Some("sqlite:flag".into()), entities: Some("folder".into()), ..Overrides::default() };
    let config = loaded(file, &environment, &overrides).unwrap();
    assert_eq!(config.listen, "127.0.0.1:1");
    assert_eq!((config.storage.url.expose(), config.storage.pool), ("sqlite:flag", 4));
    assert_eq!((config.handlers.time_limit, config.handlers.memory_limit), (Duration::from_secs(1), Size::mebibytes(8)));
    assert_eq!(config.entities.path.as_deref(), Some(Path::new("folder")));
    assert_eq!(config.limits, Config::default().limits);
}

#[test]
fn texts_that_look_like_numbers_stay_texts_in_the_environment() {
    assert_eq!(from_environment("QUOKKA_CLUSTER__NODE", "007").unwrap().cluster.node, "007");
    assert_eq!(from_environment("QUOKKA_ENTITIES__PATH", "true").unwrap().entities.path.as_deref(), Some(Path::new("true")));
}

#[test]
fn variables_that_kubernetes_sets_are_no_settings() {
    for name in ["QUOKKA_SERVICE_HOST", "QUOKKA_SERVICE_PORT_HTTP", "QUOKKA_PORT", "QUOKKA_PORT_9865_TCP_ADDR", "QUOKKA_DB_PORT_3306_TCP", "QUOKKAS"] {
        assert_eq!(from_environment(name, "tcp://10.0.0.1:9865"), Ok(Config::default()), "{name}");
    }
}

#[test]
fn what_is_wrong_is_named_with_its_source_and_what_is_allowed() {
    for (file, expected) in [
        ("[storage]\npool = 0", "storage.pool (from FILE): is 0; allowed: a whole number from 1 to 1000"),
        ("[storage]\npool = -1", "storage.pool (from FILE): is -1; allowed: a whole number from 1 to 1000"),
        ("[storage]\npool = \"many\"", "storage.pool (from FILE): is \"many\"; allowed: a whole number from 1 to 1000"),
        ("[storage]\nshards = 5000", "storage.shards (from FILE): is 5000; allowed: a whole number from 1 to 4096"),
        ("[commands]\ntimeout = \"soon\"", "commands.timeout (from FILE): is \"soon\"; allowed: \"10ms\" to \"10m\""),
        ("[commands]\ntimeout = 10", "commands.timeout (from FILE): is 10; allowed: \"10ms\" to \"10m\""),
        ("[commands]\nreuse = \"ignore\"", "commands.reuse (from FILE): is \"ignore\"; allowed: \"replay\" or \"refuse\""),
        ("[commands]\nbatch_bytes_max = \"9 MiB\"", "commands.batch_bytes_max (from FILE): is \"9 MiB\"; allowed: \"64 KiB\" to \"8 MiB\""),
        ("[limits]\nbody_max = \"5 MiB\"", "limits.body_max (from FILE): is \"5 MiB\"; allowed: \"1 KiB\" to \"4 MiB\""),
        ("[cluster]\nnode = \"a b\"", "cluster.node (from FILE): is \"a b\"; allowed: 1 to 64 letters, digits, '.', '_' and '-'"),
        ("[cluster]\ntopology = \"ring\"", "cluster.topology (from FILE): is \"ring\"; allowed: \"single\" or \"static\" or \"elected\""),
        ("[cluster]\nadvertise = \"node-1:9865\"", "cluster.advertise (from FILE): is \"node-1:9865\"; allowed: an http URL such as"),
        ("[cluster]\netcd = [\"a:2379\"]", "cluster.etcd (from FILE): is [\"a:2379\"]; allowed: a list of http URLs such as"),
        ("[cluster]\nnodes = [{ id = \"a\", url = \"http://a\" }, { id = \"a\", url = \"http://b\" }]", "cluster.nodes (from FILE): is [{"),
        ("[cluster]\nnodes = [{ id = \"a\", url = \"http://a\", port = 1 }]", "cluster.nodes (from FILE): is [{"),
        ("[cluster]\ntopology = \"static\"", "cluster.nodes (from all layers together): is empty, and cluster.topology is \"static\": name all nodes"),
        ("[cluster]\ntopology = \"elected\"\nelection = \"etcd\"", "cluster.etcd (from all layers together): is empty, and cluster.election is \"etcd\""),
        (
            "listen = \"0.0.0.0:80\"\n[cluster]\ntopology = \"elected\"",
            "cluster.advertise (from all layers together): is not set, and others cannot reach this node at 0.0.0.0:80: name the URL",
        ),
        ("[cluster]\netcd_user = \"root\"", "cluster.etcd_user (from all layers together): and the password go together: give both or none"),
        ("listen = \"9865\"", "listen (from FILE): is \"9865\"; allowed: address:port, such as 127.0.0.1:9865 or 0.0.0.0:80"),
        ("[storage]\ndurability = 1", "storage.durability (from FILE): there is no such key; `quokka config` prints all that there are"),
        ("[storage]\npol = 1", "storage.pol (from FILE): there is no such key; did you mean storage.pool?"),
        ("pool = 1", "pool (from FILE): there is no such key; did you mean storage.pool?"),
        ("[stroage]\npool = 1", "stroage (from FILE): there is no such key; `quokka config` prints all that there are"),
        ("storage = \"mysql://db\"", "storage (from FILE): is a section, not a value: set its keys, such as storage.url"),
        ("[listen]\nport = 1", "listen (from FILE): is a value, not a section"),
        (
            "[limits]\ndocument_max = \"4 KiB\"",
            "limits.document_max (from all layers together): is 4 KiB, less than limits.body_max (1 MiB): a request must fit into the event that it makes",
        ),
        (
            "[storage]\nretry_for = \"11s\"",
            "storage.retry_for (from all layers together): is longer than commands.timeout: callers would have gone before they are told",
        ),
    ] {
        let problems = from_file(file).map_err(|problems| problems.into_iter().filter(|problem| problem.contains(expected)).count());
        assert_eq!(problems, Err(1), "{file}: {:?}", from_file(file));
    }
}

#[test]
fn the_environment_is_held_to_the_same_rules() {
    for (name, value, expected) in [
        ("QUOKKA_STORAGE__POOL", "0", "storage.pool (from the environment variable QUOKKA_STORAGE__POOL): is 0; allowed: a whole number from 1 to 1000"),
        (
            "QUOKKA_STORAGE__POOL",
            "lots",
            "storage.pool (from the environment variable QUOKKA_STORAGE__POOL): is \"lots\"; allowed: a whole number from 1 to 1000",
        ),
        ("QUOKKA_LOG__LEVEL", "loud", "log.level (from the environment variable QUOKKA_LOG__LEVEL): is \"loud\"; allowed: error, warn"),
        ("QUOKKA_LOG__LEVEL", "quokka=loud", "log.level (from the environment variable QUOKKA_LOG__LEVEL): is \"quokka=loud\"; allowed: error, warn"),
        ("QUOKKA_STORAGE_URL", "sqlite:x", "storage_url (from the environment variable QUOKKA_STORAGE_URL): there is no such key; did you mean storage.url?"),
        ("QUOKKA_STORAGE__SPEED", "9", "storage.speed (from the environment variable QUOKKA_STORAGE__SPEED): there is no such key"),
    ] {
        let problems = from_environment(name, value).unwrap_err();
        assert!(problems.len() == 1 && problems[0].starts_with(expected), "{name}={value}: {problems:?}");
    }
}

#[test]
fn everything_that_is_wrong_is_told_at_once() {
    let problems = from_file("[storage]\npool = 0\nspeed = 1\n[shutdown]\ngrace = \"1h\"").unwrap_err();
    assert_eq!(problems.len(), 3, "{problems:?}");
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = load_from(Some(Path::new("no/such.toml")), [], &Overrides::default()).unwrap_err().to_string();
    assert!(error.contains("no/such.toml: the configuration file cannot be read"), "{error}");
    let problems = from_file("[storage\npool = 1").unwrap_err();
    assert!(problems[0].starts_with("FILE: TOML parse error at line 1"), "{problems:?}");
}

#[test]
fn the_url_can_stand_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("url");
    std::fs::write(&secret, "mysql://app:hunter2@db/quokka\n").unwrap();
    let file = format!("[storage]\nurl_file = {:?}", secret.display().to_string());
    let config = from_file(&file).unwrap();
    assert_eq!(config.storage.url.expose(), "mysql://app:hunter2@db/quokka");
    let printed = config.to_toml().unwrap();
    assert_eq!(from_file(&printed), Ok(config), "what is printed reads back");

    let overrides = Overrides { storage: Some("sqlite:x".into()), ..Overrides::default() };
    let config = loaded(&file, &[], &overrides).unwrap();
    assert_eq!((config.storage.url.expose(), config.storage.url_file), ("sqlite:x", None), "the later layer wins");

    let both = from_file(&format!("{file}\nurl = \"sqlite:x\"")).unwrap_err();
    assert!(both[0].contains("give one of the two"), "{both:?}");
    std::fs::write(&secret, "hunter2").unwrap();
    let wrong = from_file(&file).unwrap_err();
    assert!(wrong[0].starts_with("storage.url_file (from FILE)") && !wrong[0].contains("hunter2"), "{wrong:?}");
}

#[test]
fn a_password_is_shown_nowhere() {
    for (url, expected) in [
        ("mysql://app:hunter2@db:3306/quokka", "mysql://app:***@db:3306/quokka"),
        ("mysql://app:hun/te@r2@db/quokka", "mysql://app:***@db/quokka"),
        ("mysql://app@db/quokka", "mysql://app@db/quokka"),
        ("sqlite:a:b@c", "sqlite:a:b@c"),
    ] {
        let config = from_environment("QUOKKA_STORAGE__URL", url).unwrap();
        assert_eq!(config.storage.url.expose(), url);
        assert!(config.to_toml().unwrap().contains(&format!("url = \"{expected}\"")), "{url}");
        assert!(format!("{config:?}").contains(&format!("\"{expected}\"")), "{url}");
    }
    let problems = from_environment("QUOKKA_STORAGE__URL", "postgres://app:hunter2@db/quokka").unwrap_err();
    assert!(problems[0].contains("postgres://app:***@db/quokka") && !problems[0].contains("hunter2"), "{problems:?}");
}

#[test]
fn what_is_printed_reads_back_as_the_same() {
    let printed = Config::default().to_toml().unwrap();
    assert!(printed.contains("# path is not set"), "{printed}");
    assert_eq!(from_file(&printed), Ok(Config::default()));
}

#[test]
fn sizes_are_written_exactly() {
    for (bytes, text) in [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1024, "1 KiB"),
        (64_000_000, "64 MB"),
        (8 << 20, "8 MiB"),
        (1 << 40, "1024 GiB"),
        (1_000_001, "1000001 B"),
    ] {
        let toml = format!("[commands]\ncache_max = {bytes}");
        let size = from_file(&toml).unwrap().commands.cache_max;
        assert_eq!((size.bytes(), size.to_string()), (bytes, text.to_string()));
        assert_eq!(from_file(&format!("[commands]\ncache_max = {text:?}")).unwrap().commands.cache_max, size);
    }
}

#[test]
fn lists_can_be_given_in_the_environment() {
    let urls = |value: &str| from_environment("QUOKKA_CLUSTER__ETCD", value).map(|config| config.cluster.etcd);
    let expected = Ok(vec!["http://a:2379".to_owned(), "http://b:2379".to_owned()]);
    assert_eq!(urls("http://a:2379, http://b:2379"), expected);
    assert_eq!(urls("[\"http://a:2379\", \"http://b:2379\"]"), expected);
    assert!(urls("[oops").unwrap_err()[0].contains("allowed: a list of http URLs"));
    let nodes = from_environment("QUOKKA_CLUSTER__NODES", "[{ id = \"a\", url = \"http://a:1\" }]").unwrap().cluster.nodes;
    assert_eq!(nodes, [Node { id: "a".into(), url: "http://a:1".into() }]);
}

#[test]
fn a_password_is_never_shown() {
    let file = "[cluster]\netcd_user = \"root\"\netcd_password = \"hunter2\"";
    let config = from_file(file).unwrap();
    assert_eq!(config.cluster.etcd_password.as_ref().map(Secret::expose), Some("hunter2"));
    assert!(!format!("{config:?}").contains("hunter2"));
    assert!(!config.to_toml().unwrap().contains("password"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("password");
    std::fs::write(&path, "hunter2\n").unwrap();
    let from_its_file = format!("[cluster]\netcd_user = \"root\"\netcd_password_file = {path:?}");
    assert_eq!(from_file(&from_its_file).unwrap().cluster.etcd_password, config.cluster.etcd_password);
    let both = format!("{from_its_file}\netcd_password = \"other\"");
    assert!(from_file(&both).unwrap_err()[0].contains("give one of the two"));
}
