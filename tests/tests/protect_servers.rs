//! Tests servers in a protected VM as users run them: a client's single connection outlives the
//! host, and no answer is taken back.

use keyframe_tests::TestEnv;
use keyframe_tests::protection::{GUEST, Hosts, Seen};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The answers that the client gets before the host dies, and after.
const ANSWERS: u64 = 300;
/// How long the guest may take to boot under TCG, on a busy machine.
const BOOT: Duration = Duration::from_mins(5);

const REDIS: &str = "redis-server --bind 0.0.0.0 --protected-mode no --save '' --appendonly no";
const NGINX: &str = "mkdir -p /srv/files
for n in 0 1 2 3 4 5 6 7; do yes \"file $n\" | head -c $((1000 + 7000 * n)) > /srv/files/$n; done
cat > /run/nginx.conf <<'END'
worker_processes 1; daemon off; pid /run/nginx.pid; error_log stderr;
events { }
http {
    access_log off; keepalive_requests 1000000; keepalive_timeout 600s;
    server { listen 80; location = /status { stub_status; } location / { root /srv/files; } }
}
END
nginx -c /run/nginx.conf";

/// Runs one exchange after the other over one connection. `ask` returns the error of a wrong
/// answer.
fn converse(
    port: u16,
    (ends, seen): (&AtomicBool, &Mutex<Seen>),
    ask: impl Fn(&mut BufReader<TcpStream>, u64) -> Result<(), String>,
) {
    let wrong = |text: String| seen.lock().expect("the test's thread").wrong = Some(text);
    let address = format!("{GUEST}:{port}").parse().expect("an address");
    let began = Instant::now();
    let stream = loop {
        match TcpStream::connect_timeout(&address, Duration::from_millis(500)) {
            Ok(stream) => break stream,
            Err(_) if began.elapsed() < BOOT && !ends.load(Ordering::Relaxed) => {
                std::thread::sleep(Duration::from_millis(200));
            }
            Err(e) => return wrong(format!("connect to the guest: {e}")),
        }
    };
    stream.set_nodelay(true).expect("set an option");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set a timeout");
    let mut stream = BufReader::new(stream);
    for number in 1.. {
        if ends.load(Ordering::Relaxed) {
            return;
        }
        let asked = Instant::now();
        if let Err(problem) = ask(&mut stream, number) {
            return wrong(format!("exchange {number}: {problem}"));
        }
        let mut seen = seen.lock().expect("the test's thread");
        (seen.entries, seen.at) = (number, Some(Instant::now()));
        seen.longest = seen.longest.max(asked.elapsed());
    }
}

fn line(stream: &mut BufReader<TcpStream>) -> Result<String, String> {
    let mut line = String::new();
    match stream.read_line(&mut line) {
        Ok(0) => Err("the connection was closed".into()),
        Ok(_) => Ok(line.trim_end().to_owned()),
        Err(e) => Err(format!("the connection broke: {e}")),
    }
}

fn say(stream: &mut BufReader<TcpStream>, text: &str) -> Result<(), String> {
    stream.get_mut().write_all(text.as_bytes()).map_err(|e| format!("the connection broke: {e}"))
}

fn expect(found: &str, wanted: &str) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("{found:?} instead of {wanted:?}")) }
}

/// Increments a counter, which must grow by one each time, and reads keys, which must have their
/// last value.
fn redis(stream: &mut BufReader<TcpStream>, number: u64) -> Result<(), String> {
    say(stream, "INCR counter\r\n")?;
    expect(&line(stream)?, &format!(":{number}"))?;
    say(stream, &format!("SET key{} value{number}\r\n", number % 50))?;
    expect(&line(stream)?, "+OK")?;
    let older = number.saturating_sub(49).max(1);
    say(stream, &format!("GET key{}\r\n", older % 50))?;
    let wanted = format!("value{older}");
    expect(&line(stream)?, &format!("${}", wanted.len()))?;
    expect(&line(stream)?, &wanted)
}

/// Reads files, which must be unchanged, and a count of requests, which only this client
/// increments.
fn nginx(stream: &mut BufReader<TcpStream>, number: u64) -> Result<(), String> {
    let status = number.is_multiple_of(10);
    let path = if status { "status".into() } else { (number % 8).to_string() };
    say(stream, &format!("GET /{path} HTTP/1.1\r\nHost: guest\r\n\r\n"))?;
    expect(&line(stream)?, "HTTP/1.1 200 OK")?;
    let mut len = None;
    loop {
        let header = line(stream)?.to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        len = len
            .or(header.strip_prefix("content-length: ").and_then(|len| len.parse::<usize>().ok()));
    }
    let mut body = vec![0; len.ok_or("an answer without a length")?];
    stream.read_exact(&mut body).map_err(|e| format!("the connection broke: {e}"))?;
    let body = String::from_utf8_lossy(&body).into_owned();
    if status {
        // accepts handled requests
        return expect(body.lines().nth(2).unwrap_or_default().trim(), &format!("1 1 {number}"));
    }
    let text = format!("file {path}\n");
    let len = 1000 + 7000 * (number % 8) as usize;
    expect(&body, &text.repeat(len / text.len() + 1)[..len])
}

/// Protects the real guest that runs `server`, and kills its host while a client is connected.
fn survives(
    server: &str,
    port: u16,
    ask: fn(&mut BufReader<TcpStream>, u64) -> Result<(), String>,
) {
    let env = TestEnv::without_store();
    let job = env.path().join("job.sh");
    let script =
        format!("#!/bin/bash\nip addr flush dev eth0\nip addr add {GUEST}/24 dev eth0\n{server}\n");
    std::fs::write(&job, script).expect("write the job");
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guests/real/run.sh");
    let mut command = Command::new(run);
    command.args(["--print", "--mem", "512M", "--smp", "2", "--job"]).arg(&job).arg("--").args([
        "-netdev",
        "tap,id=n0,ifname=tap0,script=no,downscript=no",
        "-device",
        "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:15,romfile=",
    ]);
    let output = command.output().expect("run guests/real/run.sh");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let qemu: Vec<String> =
        String::from_utf8_lossy(&output.stdout).trim().split(' ').map(str::to_owned).collect();

    let hosts = Hosts::new(&env);
    let _witness = hosts.witness(&env);
    // A busy machine must not look like a failed host.
    let patient = ["--detection", "2s"];
    let mut standby = hosts.standby(&env, "b", &patient);
    let mut vm = hosts.protect_line(&env, &patient, &qemu);
    let client = hosts.client_running(move |ends, seen| converse(port, (ends, seen), ask));
    vm.wait_within(BOOT, |_| {
        let seen = client.seen();
        (seen.entries > 0 || seen.wrong.is_some()).then_some(())
    });
    hosts.wait_until_protected(&env, "a", &mut vm);
    client.wait_for_entries(ANSWERS, &mut vm);
    let before = client.seen().longest;
    hosts.a.kill_all();
    client.wait_for_entries(ANSWERS, &mut standby);
    assert_eq!(hosts.running_qemus("b"), 1);
    let seen = client.end();
    println!(
        "{} exchanges, the longest {:?}, before the failure {before:?}",
        seen.entries, seen.longest
    );
}

#[test]
#[ignore = "make soak"]
fn soak_a_redis_server_survives_its_host() {
    survives(REDIS, 6379, redis);
}

#[test]
#[ignore = "make soak"]
fn soak_a_web_server_survives_its_host() {
    survives(NGINX, 80, nginx);
}
