//! Real database servers: one of each kind for all tests of the run, started when first needed, on data of its own.
//!
//! A server never outlives the tests: a shell that waits on a pipe from the test process kills it when the pipe closes, however the process ends.
//! The servers' defaults are as unhelpful as an operator could make them (no strict mode, a zone other than UTC, latin1, German
//! messages, small packets), so that every test shows that quokka depends on none.
//!
//! `TEST_MARIADB_URL` and `TEST_MYSQL_URL` (a user who may make databases and users; no database) name servers to use instead. Where there is no server,
//! tests of its kind end at once, with a word on stderr; with `TEST_REQUIRE_SERVERS=1` they fail.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The password of the users that tests make: every character that a URL or a literal could trip over.
pub const PASSWORD: &str = "S3cret'\"\\@:/?#%&+ é";
const PASSWORD_IN_URL: &str = "S3cret%27%22%5C%40%3A%2F%3F%23%25%26%2B%20%C3%A9";

const SUPERVISE: &str =
    r#"dir=$1; shift; "$@" </dev/null >>"$dir/log" 2>&1 & pid=$!; read how; kill -KILL $pid; wait $pid; [ "$how" = keep ] || rm -rf "$dir""#;

const HOSTILE: [&str; 11] = [
    "--bind-address=127.0.0.1",
    "--sql-mode=",
    "--default-time-zone=+05:30",
    "--character-set-server=latin1",
    "--collation-server=latin1_swedish_ci",
    "--transaction-isolation=REPEATABLE-READ",
    "--lc-messages=de_DE",
    "--max-allowed-packet=4M",
    "--innodb-buffer-pool-size=64M",
    "--performance-schema=OFF",
    "--max-connections=400",
];

/// The kinds of server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    MariaDb,
    MySql,
}

/// A server that runs.
pub struct Server {
    engine: Engine,
    port: u16,
    admin: Opts,
    /// None where the server was there before the tests.
    own: Option<Own>,
    /// Held for reading by tests that live with others, for writing by those that change the whole server.
    lock: RwLock<()>,
}

struct Own {
    command: Vec<String>,
    dir: PathBuf,
    supervisor: Mutex<Option<Child>>,
}

/// A fresh, empty database, and a user who may do everything in it and nothing else.
pub struct Database {
    url: String,
    name: String,
    server: &'static Server,
    _shared: Option<RwLockReadGuard<'static, ()>>,
    _alone: Option<RwLockWriteGuard<'static, ()>>,
}

static MARIADB: OnceCell<Option<Server>> = OnceCell::const_new();
static MYSQL: OnceCell<Option<Server>> = OnceCell::const_new();

impl Engine {
    /// The server of this kind; none where it is not installed.
    pub async fn server(self) -> Option<&'static Server> {
        let cell = match self {
            Engine::MariaDb => &MARIADB,
            Engine::MySql => &MYSQL,
        };
        cell.get_or_init(|| Server::find(self)).await.as_ref()
    }

    /// A fresh database on that server, beside other tests.
    pub async fn database(self) -> Option<Database> {
        let server = self.server().await?;
        let shared = server.lock.read().await;
        Some(Database { _shared: Some(shared), ..Database::make(server).await })
    }

    /// A fresh database, with no other test on the server; none also where the server is not the tests' own.
    pub async fn database_alone(self) -> Option<Database> {
        let server = self.server().await?;
        if server.own.is_none() {
            return missing(self, "must be the tests' own to be stopped and changed");
        }
        let alone = server.lock.write().await;
        Some(Database { _alone: Some(alone), ..Database::make(server).await })
    }
}

fn missing<T>(engine: Engine, why: &str) -> Option<T> {
    assert!(std::env::var_os("TEST_REQUIRE_SERVERS").is_none_or(|value| value != "1"), "{engine:?} {why}, and TEST_REQUIRE_SERVERS=1");
    eprintln!("not tested: {engine:?} {why}");
    None
}

impl Database {
    async fn make(server: &'static Server) -> Database {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("q_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let mut admin = server.admin().await;
        let password = PASSWORD.replace('\\', r"\\").replace('\'', r"\'");
        for sql in
            [format!("CREATE DATABASE {name}"), format!("CREATE USER {name}@'%' IDENTIFIED BY '{password}'"), format!("GRANT ALL ON {name}.* TO {name}@'%'")]
        {
            admin.query_drop(sql).await.unwrap();
        }
        admin.disconnect().await.unwrap();
        Database { url: server.url(&name, &name), name, server, _shared: None, _alone: None }
    }

    /// The URL, as quokka takes it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same through another port, as of a proxy.
    pub fn url_through(&self, port: u16) -> String {
        let own = format!(":{}/", self.server.port);
        assert!(self.url.contains(&own));
        self.url.replace(&own, &format!(":{port}/"))
    }

    /// A connection of the administrator, in this database.
    pub async fn admin(&self) -> Conn {
        let mut admin = self.server.admin().await;
        admin.query_drop(format!("USE {}", self.name)).await.unwrap();
        admin
    }

    /// Its name, which is also its user's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server it is on.
    pub fn server(&self) -> &'static Server {
        self.server
    }
}

impl Server {
    /// Which kind it is.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a database for a user with [`PASSWORD`].
    pub fn url(&self, user: &str, database: &str) -> String {
        format!("mysql://{user}:{PASSWORD_IN_URL}@{}:{}/{database}", self.admin.ip_or_hostname(), self.port)
    }

    /// A connection of the administrator.
    pub async fn admin(&self) -> Conn {
        let mut conn = Conn::new(self.admin.clone()).await.unwrap();
        conn.query_drop("SET NAMES utf8mb4, lc_messages = 'en_US'").await.unwrap();
        conn
    }

    /// Kills it as a crash would. For tests that have it alone.
    pub fn kill(&self) {
        let own = self.own.as_ref().unwrap();
        let mut supervisor = own.supervisor.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap();
        supervisor.stdin.take().unwrap().write_all(b"keep\n").unwrap();
        supervisor.wait().unwrap();
    }

    /// Starts it on the same port and data, and waits until it answers.
    pub async fn start(&self) {
        let own = self.own.as_ref().unwrap();
        let supervisor = supervise(&own.command, &own.dir);
        *own.supervisor.lock().unwrap_or_else(PoisonError::into_inner) = Some(supervisor);
        let give_up = Instant::now() + Duration::from_secs(120);
        while Conn::new(self.admin.clone()).await.is_err() {
            let log = || std::fs::read_to_string(own.dir.join("log")).unwrap_or_default();
            assert!(Instant::now() < give_up, "{:?} does not start:\n{}", self.engine, log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn find(engine: Engine) -> Option<Server> {
        let variable = match engine {
            Engine::MariaDb => "TEST_MARIADB_URL",
            Engine::MySql => "TEST_MYSQL_URL",
        };
        if let Ok(url) = std::env::var(variable) {
            let admin = Opts::from_url(&url).unwrap();
            return Some(Server { engine, port: admin.tcp_port(), admin, own: None, lock: RwLock::default() });
        }
        let dir = tempfile::Builder::new().prefix("quokka-test-").tempdir().unwrap().keep();
        let port = super::port::free();
        let Some(command) = (match engine {
            Engine::MariaDb => mariadb(&dir),
            Engine::MySql => mysql(&dir),
        }) else {
            std::fs::remove_dir(&dir).unwrap();
            return missing(engine, "is not installed");
        };
        let mut command: Vec<String> = command;
        command.push(format!("--port={port}"));
        command.extend(HOSTILE.map(str::to_owned));
        let admin = OptsBuilder::default().ip_or_hostname("127.0.0.1").tcp_port(port).user(Some("root")).prefer_socket(false).into();
        let server = Server { engine, port, admin, own: Some(Own { command, dir, supervisor: Mutex::default() }), lock: RwLock::default() };
        server.start().await;
        Some(server)
    }
}

/// Starts the shell that starts the server and kills it when the pipe closes. In a group of its own, so that Ctrl-C does not kill the shell first.
fn supervise(command: &[String], dir: &Path) -> Child {
    use std::os::unix::process::CommandExt;
    let mut shell = Command::new("sh");
    shell.args(["-c", SUPERVISE, "supervise"]).arg(dir).args(command);
    shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap()
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from)).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Servers want to be told where root is meant.
fn user() -> Option<String> {
    rustix::process::getuid().is_root().then(|| "--user=root".to_owned())
}

fn run(command: &[String]) {
    let output = Command::new(&command[0]).args(&command[1..]).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
}

/// Makes the data; returns the command, without its port.
fn mariadb(dir: &Path) -> Option<Vec<String>> {
    let server = find_program("mariadbd")?.display().to_string();
    let install = find_program("mariadb-install-db")?.display().to_string();
    let dir = dir.display();
    let mut init = vec![install, "--no-defaults".into(), format!("--datadir={dir}/data")];
    init.extend(["--auth-root-authentication-method=normal", "--skip-test-db"].map(str::to_owned));
    init.extend(user());
    run(&init);
    let mut command = vec![server, "--no-defaults".into(), format!("--datadir={dir}/data"), format!("--socket={dir}/s.sock"), format!("--pid-file={dir}/pid")];
    command.push("--innodb-log-file-size=32M".into());
    command.extend(user());
    Some(command)
}

/// Makes the data; returns the command, without its port. MySQL may be installed in the system, or unpacked with the libraries and the
/// loader that it needs into `$MYSQL9_HOME/root` (by default `~/.cache/mysql9/root`).
fn mysql(dir: &Path) -> Option<Vec<String>> {
    let dir = dir.display();
    let mut command = unpacked_mysql().or_else(|| {
        let server = find_program("mysqld")?;
        let version = Command::new(&server).arg("--version").output().ok()?;
        (!String::from_utf8_lossy(&version.stdout).contains("MariaDB")).then(|| vec![server.display().to_string(), "--no-defaults".into()])
    })?;
    command.push(format!("--datadir={dir}/data"));
    command.extend(user());
    let mut init = command.clone();
    init.push("--initialize-insecure".into());
    run(&init);
    command.extend([format!("--socket={dir}/s.sock"), format!("--pid-file={dir}/pid")]);
    command.extend(["--mysqlx=OFF", "--secure-file-priv=NULL", "--innodb-redo-log-capacity=32M"].map(str::to_owned));
    Some(command)
}

fn unpacked_mysql() -> Option<Vec<String>> {
    let home = std::env::var_os("MYSQL9_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/mysql9")))?;
    let root = home.join("root");
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let (loader, server) = (libraries.join("ld-linux-x86-64.so.2"), root.join("usr/sbin/mysqld"));
    if !loader.is_file() || !server.is_file() {
        return None;
    }
    let usr = root.join("usr");
    let (libraries, usr) = (libraries.display(), usr.display());
    Some(vec![
        loader.display().to_string(),
        "--library-path".into(),
        format!("{libraries}:{usr}/lib/mysql/private"),
        server.display().to_string(),
        "--no-defaults".into(),
        format!("--basedir={usr}"),
        format!("--lc-messages-dir={usr}/share/mysql"),
        format!("--plugin-dir={usr}/lib/mysql/plugin"),
    ])
}
