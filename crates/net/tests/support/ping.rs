//! ARP and ICMP echo between 10.0.2.9 (02:00:00:00:00:09) and the small guest (10.0.2.15,
//! 02:00:00:00:00:01).

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 9];
const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OUR_IP: [u8; 4] = [10, 0, 2, 9];
const THEIR_IP: [u8; 4] = [10, 0, 2, 15];
const IDENTIFIER: [u8; 2] = *b"kf";

/// An ARP request for the guest's address, which also announces ours.
pub fn who_has() -> Vec<u8> {
    let arp = [0, 1, 8, 0, 6, 4, 0, 1];
    [&[255; 6][..], &OURS, &[8, 6], &arp, &OURS, &OUR_IP, &[0; 6], &THEIR_IP, &[0; 18]].concat()
}

/// An echo request.
pub fn request(sequence: u16) -> Vec<u8> {
    let mut icmp = [&[8, 0, 0, 0][..], &IDENTIFIER, &sequence.to_be_bytes(), b"keyframe"].concat();
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum);
    let len = (20 + icmp.len() as u16).to_be_bytes();
    let mut ip = [&[0x45, 0][..], &len, &[0, 0, 0x40, 0, 64, 1, 0, 0], &OUR_IP, &THEIR_IP].concat();
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    [&THEIRS[..], &OURS, &[8, 0], &ip, &icmp, &[0; 16]].concat()
}

/// The sequence number of an echo reply.
pub fn answer(frame: &[u8]) -> Option<u16> {
    let icmp = frame.get(34..42)?;
    let is_reply =
        frame[12..14] == [8, 0] && frame[23] == 1 && icmp[0] == 0 && icmp[4..6] == IDENTIFIER;
    is_reply.then(|| u16::from_be_bytes([icmp[6], icmp[7]]))
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 = bytes.chunks(2).map(|p| u32::from(u16::from_be_bytes([p[0], p[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}
