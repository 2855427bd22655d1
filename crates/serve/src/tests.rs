//! Clients that do what no client of ours does. What ours does is tested with it, in
//! `keyframe_store_backend::served`.

use crate::{Error, Server, ServerIdentity, ServerOptions};
use keyframe_store::Store;
use keyframe_store_backend::served::wire::{Answer, RefusalCode, Request};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

const WAIT_MAX: Duration = Duration::from_mins(2);

fn options(listen: &str, token: Option<&str>) -> ServerOptions {
    let token = token.map(|token| Zeroizing::new(token.as_bytes().to_vec()));
    ServerOptions {
        listen: listen.parse().unwrap(),
        token,
        identity: ServerIdentity::fresh().unwrap(),
        connections_max: 4,
        writers_lease: None,
    }
}

/// Serves a store while `test` runs; what it has done then.
fn with_server(test: impl FnOnce(SocketAddr, &Arc<ClientConfig>)) -> crate::ServerReport {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    Store::init(&place).unwrap();
    let options = options("127.0.0.1:0", Some("secret"));
    let mut roots = RootCertStore::empty();
    roots.add(options.identity.tls.chain[0].clone()).unwrap();
    let trust = keyframe_tls::ServerTrust::Authorities(Arc::new(roots));
    let client = keyframe_tls::client_config(trust, None).unwrap();
    let server = Server::bind(&place, options).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.run(&stop).unwrap());
        let tested = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            test(server.address(), &client);
        }));
        stop.store(true, Ordering::Relaxed);
        let report = serving.join().unwrap();
        tested.unwrap();
        report
    })
}

type Link = StreamOwned<ClientConnection, TcpStream>;

fn socket(address: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(WAIT_MAX)).unwrap();
    socket
}

fn link(address: SocketAddr, config: &Arc<ClientConfig>) -> Link {
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(config.clone(), name).unwrap(), socket(address))
}

fn say(link: &mut Link, request: &Request) -> Answer {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    link.write_all(&bytes).unwrap();
    Answer::read(link, request.answer_bytes_max()).unwrap().0
}

fn hello() -> Request {
    Request::Hello { token: b"secret".to_vec() }
}

/// True if the connection has ended, whichever way.
fn has_ended(link: &mut impl Read) -> bool {
    matches!(link.read(&mut [0; 64]), Ok(0) | Err(_))
}

#[test]
fn a_server_that_can_be_reached_needs_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    Store::init(&place).unwrap();
    let error = Server::bind(&place, options("0.0.0.0:0", None)).unwrap_err();
    assert!(matches!(error, Error::Open(_)));
    assert!(error.fix().unwrap().contains("--token-file"), "{error}");
    Server::bind(&place, options("0.0.0.0:0", Some("x"))).unwrap();
    let open = Server::bind(&place, options("127.0.0.1:0", None)).unwrap();
    let error = Server::bind(&place, options(&open.address().to_string(), None)).unwrap_err();
    assert!(error.fix().unwrap().contains("another port"), "{error}");
    let error =
        Server::bind(Path::new("/no/such/store"), options("127.0.0.1:0", None)).unwrap_err();
    assert!(matches!(error, Error::Store(keyframe_store::Error::NoStore { .. })), "{error}");
}

/// Asks for files that do not exist, or not so: each refusal is an answer, and the connection goes
/// on.
fn refusals_keep_the_connection(link: &mut Link) {
    // A name that is none is an answer like others.
    let asked = say(link, &Request::List { folder: "../..".into() });
    assert!(matches!(asked, Answer::Refused(RefusalCode::Strange, _)), "{asked:?}");
    let whole = Request::File { name: "store.json".into(), len_bytes_max: 1 << 16, known: None };
    let Answer::Data(bytes) = say(link, &whole) else { panic!("no store.json") };
    let short = Request::File { name: "store.json".into(), len_bytes_max: 5, known: None };
    assert!(matches!(say(link, &short), Answer::Refused(RefusalCode::TooLong, _)));
    // A whole pack could take all memory of the server.
    let pack = Request::File { name: "packs/00000001.pack".into(), len_bytes_max: 9, known: None };
    assert!(matches!(say(link, &pack), Answer::Refused(RefusalCode::Strange, _)));
    let known = Some(*blake3::hash(&bytes).as_bytes());
    let same = Request::File { name: "store.json".into(), len_bytes_max: 1 << 16, known };
    assert_eq!(say(link, &same), Answer::Same);
    let behind = Request::Range {
        name: "store.json".into(),
        identity: 0,
        offset: u64::MAX - 3,
        len_bytes: 9,
        known: None,
    };
    assert!(matches!(say(link, &behind), Answer::Refused(..)));
    let other = Request::Range {
        name: "store.json".into(),
        identity: 7,
        offset: 0,
        len_bytes: 9,
        known: None,
    };
    assert!(matches!(say(link, &other), Answer::Refused(RefusalCode::NotFound, _)));
    assert_eq!(say(link, &whole), Answer::Data(bytes));
}

#[test]
fn what_makes_no_sense_ends_its_connection_and_no_other() {
    let report = with_server(|address, config| {
        let mut good = link(address, config);
        assert!(matches!(say(&mut good, &hello()), Answer::Data(_)));
        // No TLS.
        let mut plain = socket(address);
        plain.write_all(&[0x55; 3000]).unwrap();
        assert!(has_ended(&mut plain) || has_ended(&mut plain));
        // Before the greeting: a request, a length that no request has, and the beginning of a
        // greeting.
        let mut early = link(address, config);
        let mut bytes = Vec::new();
        Request::State.encode(&mut bytes);
        early.write_all(&bytes).unwrap();
        assert!(has_ended(&mut early));
        for bytes in [&[0xff; 4][..], &[0, 8, 0, 0], &[3, 0, 0, 0, 1, b'K', b'F']] {
            let mut link = link(address, config);
            link.write_all(bytes).unwrap();
            let answer = Answer::read(&mut link, 1000).unwrap().0;
            assert!(matches!(answer, Answer::Refused(RefusalCode::Strange, _)), "{answer:?}");
            assert!(has_ended(&mut link));
        }
        // Behind it.
        for bytes in
            [vec![0xff, 0xff, 0, 0], vec![1, 0, 0, 0, 99], [&[20, 0, 0, 0][..], &[5; 20]].concat()]
        {
            let mut link = link(address, config);
            assert!(matches!(say(&mut link, &hello()), Answer::Data(_)));
            link.write_all(&bytes).unwrap();
            let answer = Answer::read(&mut link, 1000).unwrap().0;
            assert!(matches!(answer, Answer::Refused(RefusalCode::Strange, _)), "{answer:?}");
            assert!(has_ended(&mut link));
        }
        // Gone in the middle of a request.
        let mut gone = link(address, config);
        assert!(matches!(say(&mut gone, &hello()), Answer::Data(_)));
        gone.write_all(&[9, 0, 0, 0, 1]).unwrap();
        drop(gone);
        refusals_keep_the_connection(&mut good);
    });
    assert_eq!(report.refused, 0);
}

#[test]
fn connections_are_as_many_as_were_allowed() {
    let report = with_server(|address, config| {
        let mut links: Vec<Link> = (0..4).map(|_| link(address, config)).collect();
        for link in &mut links {
            assert!(matches!(say(link, &hello()), Answer::Data(_)));
        }
        assert!(has_ended(&mut socket(address)));
        drop(links.pop());
        // Its thread ends, and then there is room.
        let began = Instant::now();
        loop {
            let mut bytes = Vec::new();
            hello().encode(&mut bytes);
            let mut link = link(address, config);
            if link.write_all(&bytes).is_ok() && Answer::read(&mut link, 1000).is_ok() {
                break;
            }
            assert!(began.elapsed() < WAIT_MAX, "no room");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(links.iter_mut().all(|link| matches!(say(link, &Request::State), Answer::Data(_))));
    });
    assert!(report.refused >= 1, "{report:?}");
}

#[test]
fn a_server_that_ends_closes_what_is_open() {
    let mut kept = None;
    with_server(|address, config| {
        let mut open = link(address, config);
        assert!(matches!(say(&mut open, &hello()), Answer::Data(_)));
        kept = Some((open, socket(address)));
    });
    let (mut open, mut raw) = kept.unwrap();
    assert!(has_ended(&mut open) && has_ended(&mut raw));
}
