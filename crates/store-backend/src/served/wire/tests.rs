//! Requests and answers, encoded and decoded.

use super::*;
use proptest::prelude::*;
use std::io;

fn requests() -> Vec<Request> {
    let name = || "packs/00000001.pack".to_owned();
    vec![
        Request::Hello { token: b"secret".to_vec() },
        Request::List { folder: "packs".into() },
        Request::File {
            name: "maps/0000000001.map".into(),
            len_bytes_max: 1 << 40,
            known: Some([7; 32]),
        },
        Request::Stat { names: vec![name(), "packs/00000002.pack".into()] },
        Request::Range {
            name: name(),
            identity: 5,
            offset: 1 << 33,
            len_bytes: 128 << 10,
            known: None,
        },
        Request::State,
        Request::Join { writer: [1; 16], holder: "me".into() },
        Request::Renew { writer: [1; 16], has_started: true },
        Request::Writers,
        Request::Space,
    ]
    .into_iter()
    .chain(acts().map(|act| Request::Write { writer: [2; 16], sequence: 1 << 40, act }))
    .collect()
}

fn acts() -> impl Iterator<Item = WriteAct> {
    let name = || "packs/00000001.pack".to_owned();
    [
        WriteAct::Started,
        WriteAct::Tell { state: b"{}".to_vec() },
        WriteAct::Create { name: name() },
        WriteAct::Append { name: name(), offset: 1 << 33, bytes: vec![1, 2] },
        WriteAct::SyncOpen { name: name() },
        WriteAct::Truncate { name: name(), len_bytes: 7 },
        WriteAct::Close { name: name() },
        WriteAct::Stage { offset: 0, bytes: vec![3] },
        WriteAct::Put { name: "tags/a".into(), is_new: true, staged: 1, bytes: Vec::new() },
        WriteAct::Remove { name: name() },
        WriteAct::RemoveAll { folder: "packs".into(), names: vec!["00000001.pack".into()] },
        WriteAct::Sync { name: name() },
        WriteAct::Leave,
    ]
    .into_iter()
}

#[test]
fn requests_come_back_and_nothing_shorter_or_longer_is_one() {
    for request in requests() {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let (len, body) = bytes.split_first_chunk::<4>().unwrap();
        assert_eq!(u32::from_le_bytes(*len) as usize, body.len());
        assert_eq!(Request::decode(body).as_ref(), Ok(&request));
        for cut in 0..body.len() {
            assert!(Request::decode(&body[..cut]).is_err(), "{request:?} cut to {cut}");
        }
        assert!(Request::decode(&[body, &[0]].concat()).is_err());
    }
}

#[test]
fn bounds_are_kept() {
    let mut bytes = Vec::new();
    Request::Stat { names: vec!["x".repeat(255); STATS_MAX] }.encode(&mut bytes);
    assert!(Request::decode(&bytes[4..]).is_ok());
    let range = Request::Range {
        name: "x".into(),
        identity: 0,
        offset: 0,
        len_bytes: RANGE_BYTES_MAX + 1,
        known: None,
    };
    bytes.clear();
    range.encode(&mut bytes);
    assert!(Request::decode(&bytes[4..]).is_err());
    let append = |len: usize| {
        let (name, bytes) = ("x".repeat(255), vec![0; len]);
        let act = WriteAct::Append { name, offset: 0, bytes };
        let mut encoded = Vec::new();
        Request::Write { writer: [0; 16], sequence: 1, act }.encode(&mut encoded);
        encoded
    };
    let longest = append(WRITE_BYTES_MAX);
    assert!(longest.len() - 4 <= WRITE_REQUEST_BYTES_MAX && Request::decode(&longest[4..]).is_ok());
    assert!(Request::decode(&append(WRITE_BYTES_MAX + 1)[4..]).is_err());
}

#[test]
fn the_space_comes_back() {
    for space in [None, Some(crate::Space { total_bytes: 1 << 40, free_bytes: 7 })] {
        assert_eq!(decode_space(&encode_space(space)), Ok(space));
    }
    assert!(decode_space(&[0; 9]).is_err() && decode_space(&[0; 24]).is_err());
}

fn answer(head: AnswerHead, body: &[u8], most: u64) -> io::Result<(Answer, u64)> {
    Answer::read(&mut &*[&head.encode()[..], body].concat(), most)
}

fn data(encoding: AnswerEncoding, body: &[u8], len: u64) -> AnswerHead {
    let wire_bytes = body.len() as u64;
    AnswerHead {
        kind: AnswerKind::Data,
        encoding,
        code: RefusalCode::None,
        wire_bytes,
        len_bytes: len,
    }
}

#[test]
fn answers_are_as_long_as_they_say_and_no_longer_than_was_asked_for() {
    let plain = data(AnswerEncoding::Plain, b"bytes", 5);
    assert_eq!(answer(plain, b"bytes", 5).unwrap(), (Answer::Data(b"bytes".to_vec()), 25));
    assert!(answer(plain, b"bytes", 4).is_err());
    assert!(answer(plain, b"byte", 5).is_err());
    assert!(answer(AnswerHead { len_bytes: 4, ..plain }, b"bytes", 5).is_err());
    let zeros = vec![0; 1 << 20];
    let packed = zstd::bulk::compress(&zeros, 1).unwrap();
    let head = data(AnswerEncoding::Zstd, &packed, 1 << 20);
    assert_eq!(answer(head, &packed, 1 << 20).unwrap().0, Answer::Data(zeros));
    // It decodes to more bytes than it announces.
    assert!(answer(AnswerHead { len_bytes: 9, ..head }, &packed, 1 << 20).is_err());
    assert!(answer(data(AnswerEncoding::Zstd, b"nonsense", 9), b"nonsense", 9).is_err());
    let refused = AnswerHead {
        kind: AnswerKind::Refused,
        code: RefusalCode::Token,
        ..data(AnswerEncoding::Plain, b"no\n", 3)
    };
    assert_eq!(
        answer(refused, b"no\n", 0).unwrap().0,
        Answer::Refused(RefusalCode::Token, "no".into())
    );
    let same = AnswerHead { kind: AnswerKind::Same, ..data(AnswerEncoding::Plain, b"", 0) };
    assert_eq!(answer(same, b"", 7).unwrap().0, Answer::Same);
    assert!(answer(AnswerHead { wire_bytes: u64::MAX, ..plain }, b"", u64::MAX).is_err());
}

#[test]
fn looks_and_names_come_back() {
    let stats = [
        None,
        Some(FileStat { identity: 1, modified: 2, len_bytes: 3, head: vec![4; HEAD_BYTES] }),
    ];
    assert_eq!(decode_stats(&encode_stats(&stats), 2).unwrap(), stats);
    assert!(decode_stats(&encode_stats(&stats), 1).is_err());
    assert!(decode_stats(&encode_stats(&stats), 3).is_err());
    let names = ["a", "b", "00000001.pack"];
    assert_eq!(decode_names(&encode_names(names)).unwrap(), names);
    assert!(decode_names(&[3, b'a']).is_err());
    // Names of no bytes would take memory and cost nothing on the wire.
    assert!(decode_names(&[1, b'a', 0]).is_err());
    let up_to = |names_max| payload::decode_names_up_to(names_max, &encode_names(names));
    assert_eq!(up_to(3).unwrap(), names);
    assert!(up_to(2).is_err());
    assert_eq!(decode_welcome(&encode_welcome([9; 16])), Ok([9; 16]));
    assert!(decode_welcome(b"HTTP/1.1 400 Bad Request\r\n\r\n").is_err());
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), count in 0..9_usize) {
        crate::fuzzing::served_request(&bytes);
        crate::fuzzing::served_answer(&bytes);
        let _ = decode_stats(&bytes, count);
    }
}
