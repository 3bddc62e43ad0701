//! A real etcd, on free ports and data of its own. It never outlives the test: a shell that waits on a pipe from the test process kills it.

use super::port;
use etcd_client::{Client, ConnectOptions};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::time::Instant;

const SUPERVISE: &str = r#"dir=$1; shift; "$@" </dev/null >>"$dir/log" 2>&1 & pid=$!; echo $pid >"$dir/pid.new"; mv "$dir/pid.new" "$dir/pid"; read how; kill -CONT $pid; kill -KILL $pid; wait $pid"#;

/// A running etcd, or one that was killed and can be started again.
pub struct Etcd {
    dir: tempfile::TempDir,
    port: u16,
    peer_port: u16,
    supervisor: Option<Child>,
}

impl Etcd {
    /// Starts one; none where etcd is not installed.
    pub async fn start() -> Option<Etcd> {
        let has_etcd = Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        if !has_etcd {
            assert!(std::env::var_os("TEST_REQUIRE_SERVERS").is_none_or(|value| value != "1"), "etcd is not installed, and TEST_REQUIRE_SERVERS=1");
            eprintln!("not tested: etcd is not installed");
            return None;
        }
        let mut etcd = Etcd { dir: tempfile::tempdir().unwrap(), port: port::free(), peer_port: port::free(), supervisor: None };
        etcd.restart().await;
        Some(etcd)
    }

    /// `http://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Starts it again, on its data and ports.
    pub async fn restart(&mut self) {
        let (client, peer) = (self.url(), format!("http://127.0.0.1:{}", self.peer_port));
        let dir = self.dir.path();
        let mut shell = Command::new("sh");
        shell.args(["-c", SUPERVISE, "supervise"]).arg(dir).args(["etcd", "--data-dir"]).arg(dir.join("data"));
        shell.args(["--listen-client-urls", &client, "--advertise-client-urls", &client, "--listen-peer-urls", &peer]);
        shell.args(["--initial-advertise-peer-urls", &peer, "--initial-cluster", &format!("default={peer}")]);
        self.supervisor = Some(shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            // Whether it asks for a password or not, one that answers is there.
            let asked = tokio::time::timeout(Duration::from_secs(1), reqwest::get(format!("{client}/health"))).await;
            if matches!(asked, Ok(Ok(reply)) if reply.status().is_success()) {
                return;
            }
            assert!(Instant::now() < deadline, "etcd does not start:\n{}", std::fs::read_to_string(dir.join("log")).unwrap_or_default());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let Some(mut supervisor) = self.supervisor.take() else { return };
        drop(supervisor.stdin.take());
        supervisor.wait().unwrap();
    }

    /// Throws its data away; it must be down.
    pub fn wipe(&self) {
        assert!(self.supervisor.is_none());
        std::fs::remove_dir_all(self.dir.path().join("data")).unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        let pid = read_pid(self.dir.path());
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    pub async fn client(&self) -> Client {
        Client::connect([self.url()], None).await.unwrap()
    }

    /// Makes it ask for the password of `root`.
    pub async fn require_password(&self, password: &str) {
        let mut client = self.client().await;
        client.user_add("root", password, None).await.unwrap();
        client.user_grant_role("root", "root").await.unwrap();
        client.auth_enable().await.unwrap();
        let options = ConnectOptions::new().with_user("root", password);
        Client::connect([self.url()], Some(options)).await.unwrap();
    }
}

fn read_pid(dir: &Path) -> i32 {
    std::fs::read_to_string(dir.join("pid")).unwrap().trim().parse().unwrap()
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}
