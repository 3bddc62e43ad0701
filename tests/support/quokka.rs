//! A quokka server as a process of its own, started from the binary under test on a port that is free.

use super::port;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How to start a server.
#[derive(Debug, Clone)]
pub struct Setup {
    /// `storage.url`
    pub storage: String,
    /// The folder of entity modules; none for the built-in examples.
    pub entities: Option<PathBuf>,
    /// Where to listen; port 0 for a free one.
    pub listen: String,
    /// Further settings as `QUOKKA_SECTION__KEY`.
    pub settings: Vec<(String, String)>,
}

impl Setup {
    pub fn on(storage: &str) -> Setup {
        Setup { storage: storage.into(), entities: None, listen: "127.0.0.1:0".into(), settings: Vec::new() }
    }

    pub fn entities(mut self, folder: &Path) -> Setup {
        self.entities = Some(folder.into());
        self
    }

    /// Adds one setting, such as `("commands.timeout", "2s")`.
    pub fn set(mut self, key: &str, value: &str) -> Setup {
        self.settings.push((format!("QUOKKA_{}", key.replace('.', "__").to_uppercase()), value.into()));
        self
    }

    /// Starts the server and waits until it says where it listens.
    pub fn start(&self) -> Server {
        match self.try_start() {
            Ok(server) => server,
            Err(log) => panic!("the server did not start:\n{log}"),
        }
    }

    /// Starts the server; what it logged where it does not come up.
    pub fn try_start(&self) -> Result<Server, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quokka"));
        // One that the system chose could be somebody else's when the server is killed and started again on it.
        let listen = self.listen.strip_suffix(":0").map_or_else(|| self.listen.clone(), |host| format!("{host}:{}", port::free()));
        command.arg("serve").arg("--listen").arg(listen).arg("--storage").arg(&self.storage);
        if let Some(folder) = &self.entities {
            command.arg("--entities").arg(folder);
        }
        command.envs(self.settings.iter().cloned());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let errors = BufReader::new(child.stderr.take().unwrap());
        let kept = log.clone();
        let reader = std::thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                let mut kept = kept.lock().unwrap();
                kept.push_str(&line);
                kept.push('\n');
            }
        });
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let base = lines.by_ref().map_while(Result::ok).find_map(|line| line.split_once("http://").map(|(_, address)| format!("http://{}", address.trim())));
        std::thread::spawn(move || lines.for_each(drop));
        match base {
            Some(base) => Ok(Server { child, base, log }),
            None => {
                let _ = child.wait();
                let _ = reader.join();
                Err(std::mem::take(&mut *log.lock().unwrap()))
            }
        }
    }
}

/// A running server; killed when dropped.
pub struct Server {
    child: Child,
    /// `http://127.0.0.1:PORT`
    pub base: String,
    log: Arc<Mutex<String>>,
}

impl Server {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn port(&self) -> u16 {
        self.base.rsplit_once(':').unwrap().1.parse().unwrap()
    }

    /// What it has written to its log so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// SIGKILL, as `kill -9` does.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM, and how it ended.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.child.wait().unwrap()
    }

    /// Bytes of memory that the server and its handler processes hold (the sum of their resident sets).
    pub fn memory(&self) -> u64 {
        let own = self.pid();
        let mut sum = 0;
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
            let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok());
            if pid == own || field("PPid:") == Some(u64::from(own)) {
                sum += field("VmRSS:").unwrap_or(0) * 1024;
            }
        }
        sum
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client that waits no longer than anything should take.
pub fn client() -> reqwest::Client {
    reqwest::Client::builder().timeout(Duration::from_secs(30)).build().unwrap()
}

/// What a request was answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub body: String,
}

impl Reply {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// Status and problem code, for tables.
    pub fn told(&self) -> String {
        let code = serde_json::from_str::<serde_json::Value>(&self.body).ok().and_then(|body| Some(body.get("code")?.as_str()?.to_owned()));
        code.map_or_else(|| self.status.to_string(), |code| format!("{} {code}", self.status))
    }
}

/// Sends a request and reads the whole answer.
pub async fn send(request: reqwest::RequestBuilder) -> Result<Reply, reqwest::Error> {
    let response = request.send().await?;
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    Ok(Reply { status, headers, body: response.text().await? })
}

/// POSTs one command.
pub async fn post(client: &reqwest::Client, base: &str, path: &str, command_id: &str, request: &str) -> Result<Reply, reqwest::Error> {
    let request = client.post(format!("{base}/v1/entities/{path}")).header("content-type", "application/json").body(request.to_owned());
    send(if command_id.is_empty() { request } else { request.header("idempotency-key", command_id) }).await
}

/// GETs a path.
pub async fn get(client: &reqwest::Client, base: &str, path: &str) -> Result<Reply, reqwest::Error> {
    send(client.get(format!("{base}{path}"))).await
}
