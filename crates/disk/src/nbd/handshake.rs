//! The NBD negotiation: the client's capabilities and the export that it chooses.

use super::input::ClientInput;
use super::wire::{
    EXPORT_DONT_FRAGMENT, EXPORT_FLAGS, FIXED_NEWSTYLE, IHAVEOPT, INFO_BLOCK_SIZE, INFO_EXPORT,
    NAME_BYTES_MAX, NBDMAGIC, NO_ZEROES, OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_LIST,
    OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY, OPTION_BYTES_MAX,
    OPTION_REPLY, PAYLOAD_BYTES_MAX, REP_ACK, REP_ERR_INVALID, REP_ERR_TOO_BIG, REP_ERR_UNKNOWN,
    REP_ERR_UNSUP, REP_INFO, REP_META_CONTEXT, REP_SERVER, read_string,
};
use super::{NbdExport, Shared};
use crate::{BLOCK_BYTES, Error, Result};
use keyframe_bytes::ByteReader;
use std::io::Write;
use std::os::unix::net::UnixStream;

/// The largest number of options that a client may send. Ten are many.
const OPTIONS_MAX: u32 = 256;
/// The number by which replies name the only metadata context, `base:allocation`.
pub const CONTEXT_ID: u32 = 1;
const CONTEXT: &[u8] = b"base:allocation";

/// The result of the negotiation with a client.
#[derive(Clone)]
pub struct Agreed {
    /// The export that the client has chosen.
    pub export: NbdExport,
    /// True if the client understands structured replies.
    pub structured: bool,
    /// True if the client may ask for the status of blocks.
    pub status: bool,
}

struct Handshake<'a> {
    shared: &'a Shared,
    output: UnixStream,
    structured: bool,
    /// The export for which the client chose the context.
    context: Option<String>,
}

fn protocol(problem: impl Into<String>) -> Error {
    Error::protocol("an NBD client", problem)
}

/// Greets the client, and answers options until the client chooses an export. Returns `None` if the
/// client disconnects. Errors: the client breaks the protocol; the connection failed.
pub fn negotiate(
    shared: &Shared,
    input: &mut ClientInput,
    output: UnixStream,
) -> Result<Option<Agreed>> {
    let mut handshake = Handshake { shared, output, structured: false, context: None };
    let mut greeting = Vec::new();
    greeting.extend(NBDMAGIC.to_be_bytes());
    greeting.extend(IHAVEOPT.to_be_bytes());
    greeting.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    handshake.send(&greeting)?;
    let mut flags = [0u8; 4];
    if !input.fill(&mut flags)? {
        return Ok(None);
    }
    let flags = u32::from_be_bytes(flags);
    if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 || flags & u32::from(FIXED_NEWSTYLE) == 0
    {
        return Err(protocol(format!(
            "it answered the greeting with flags {flags:#x}; fixed newstyle is needed"
        )));
    }
    let no_zeroes = flags & u32::from(NO_ZEROES) != 0;
    for _ in 0..OPTIONS_MAX {
        let mut header = [0u8; 16];
        if !input.fill(&mut header)? {
            return Ok(None);
        }
        let mut reader = ByteReader::new(&header);
        let (magic, option, len) =
            (reader.u64_be(), reader.u32_be().unwrap_or(0), reader.u32_be().unwrap_or(u32::MAX));
        if magic != Ok(IHAVEOPT) {
            return Err(protocol("an option with a wrong magic number"));
        }
        if len > OPTION_BYTES_MAX {
            // The longest valid names fit in less. So no valid option is refused, and the rest of
            // an invalid one is not read.
            if option == OPT_EXPORT_NAME || len > PAYLOAD_BYTES_MAX {
                return Err(protocol(format!("option {option} of {len} bytes")));
            }
            input.skip(len.into())?;
            handshake.reply(option, REP_ERR_TOO_BIG, b"")?;
            continue;
        }
        let mut data = vec![0; len as usize];
        input.exactly(&mut data)?;
        match handshake.answer(option, &data, no_zeroes)? {
            Next::Option => {}
            Next::Leave => return Ok(None),
            Next::Serve(agreed) => return Ok(Some(agreed)),
        }
    }
    Err(protocol(format!("more than {OPTIONS_MAX} options")))
}

enum Next {
    Option,
    Leave,
    Serve(Agreed),
}

impl Handshake<'_> {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.output.write_all(bytes).map_err(Error::io("an NBD client", "write to"))
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> Result<()> {
        let mut bytes = Vec::with_capacity(20 + data.len());
        bytes.extend(OPTION_REPLY.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.send(&bytes)
    }

    fn answer(&mut self, option: u32, data: &[u8], no_zeroes: bool) -> Result<Next> {
        match option {
            OPT_EXPORT_NAME => return self.export_name(data, no_zeroes),
            OPT_ABORT => {
                // The client may have disconnected without waiting for this.
                let _ = self.reply(option, REP_ACK, b"");
                return Ok(Next::Leave);
            }
            OPT_INFO | OPT_GO => return self.go(option, data),
            OPT_LIST if data.is_empty() => self.list()?,
            OPT_STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                self.reply(option, REP_ACK, b"")?;
            }
            OPT_LIST | OPT_STRUCTURED_REPLY => {
                self.reply(option, REP_ERR_INVALID, b"it takes no data")?;
            }
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => self.contexts(option, data)?,
            _ => self.reply(option, REP_ERR_UNSUP, b"")?,
        }
        Ok(Next::Option)
    }

    fn find(&self, name: &[u8]) -> Option<NbdExport> {
        let exports = &self.shared.exports;
        // The empty name means the default: the export of a server that has only one.
        let default = exports.first().filter(|_| name.is_empty() && exports.len() == 1);
        exports.iter().find(|export| export.name.as_bytes() == name).or(default).cloned()
    }

    fn flags(&self) -> u16 {
        EXPORT_FLAGS | if self.structured { EXPORT_DONT_FRAGMENT } else { 0 }
    }

    fn agreed(&self, export: NbdExport) -> Agreed {
        // A context that was chosen for another export does not apply.
        let status = self.structured && self.context.as_deref() == Some(export.name.as_str());
        Agreed { export, structured: self.structured, status }
    }

    /// Handles the old option to choose an export. A refusal ends the connection, because this
    /// option has no error reply.
    fn export_name(&mut self, name: &[u8], no_zeroes: bool) -> Result<Next> {
        let Some(export) = self.find(name) else {
            return Err(protocol(format!("no export {:?}", String::from_utf8_lossy(name))));
        };
        let mut bytes = Vec::new();
        bytes.extend(export.disk.disk_bytes().to_be_bytes());
        bytes.extend(self.flags().to_be_bytes());
        if !no_zeroes {
            bytes.extend([0; 124]);
        }
        self.send(&bytes)?;
        Ok(Next::Serve(self.agreed(export)))
    }

    fn go(&mut self, option: u32, data: &[u8]) -> Result<Next> {
        let mut reader = ByteReader::new(data);
        let parsed =
            read_string(&mut reader).ok().zip(reader.u16_be().ok()).filter(|(name, count)| {
                name.len() <= NAME_BYTES_MAX && reader.remaining().len() == usize::from(*count) * 2
            });
        let Some((name, _)) = parsed else {
            self.reply(option, REP_ERR_INVALID, b"not a name and a list of information requests")?;
            return Ok(Next::Option);
        };
        let Some(export) = self.find(name) else {
            self.reply(option, REP_ERR_UNKNOWN, b"no such export")?;
            return Ok(Next::Option);
        };
        let mut info = Vec::new();
        info.extend(INFO_EXPORT.to_be_bytes());
        info.extend(export.disk.disk_bytes().to_be_bytes());
        info.extend(self.flags().to_be_bytes());
        self.reply(option, REP_INFO, &info)?;
        // The smallest, preferred and largest size. Any byte can be written, but then the server
        // must read the rest of its block.
        let mut sizes = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [1, BLOCK_BYTES as u32, PAYLOAD_BYTES_MAX] {
            sizes.extend(size.to_be_bytes());
        }
        self.reply(option, REP_INFO, &sizes)?;
        self.reply(option, REP_ACK, b"")?;
        Ok(if option == OPT_GO { Next::Serve(self.agreed(export)) } else { Next::Option })
    }

    fn list(&mut self) -> Result<()> {
        for export in &self.shared.exports.clone() {
            let mut data = (export.name.len() as u32).to_be_bytes().to_vec();
            data.extend(export.name.as_bytes());
            self.reply(OPT_LIST, REP_SERVER, &data)?;
        }
        self.reply(OPT_LIST, REP_ACK, b"")
    }

    fn contexts(&mut self, option: u32, data: &[u8]) -> Result<()> {
        if option == OPT_SET_META_CONTEXT {
            self.context = None;
        }
        let Some((name, queries)) = parse_contexts(data).filter(|_| self.structured) else {
            return self.reply(
                option,
                REP_ERR_INVALID,
                b"negotiate structured replies first, then send a name and queries",
            );
        };
        let Some(export) = self.find(name) else {
            return self.reply(option, REP_ERR_UNKNOWN, b"no such export");
        };
        let listing = option == OPT_LIST_META_CONTEXT;
        let wanted = queries.contains(&CONTEXT)
            || listing && (queries.is_empty() || queries.contains(&&b"base:"[..]));
        if wanted {
            let mut reply = if listing { 0 } else { CONTEXT_ID }.to_be_bytes().to_vec();
            reply.extend(CONTEXT);
            self.reply(option, REP_META_CONTEXT, &reply)?;
            if !listing {
                self.context = Some(export.name);
            }
        }
        self.reply(option, REP_ACK, b"")
    }
}

/// Splits the data of a context option into the export's name and the queries.
fn parse_contexts(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut reader = ByteReader::new(data);
    let name = read_string(&mut reader).ok().filter(|name| name.len() <= NAME_BYTES_MAX)?;
    let count = reader.u32_be().ok()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(read_string(&mut reader).ok()?);
    }
    reader.is_empty().then_some((name, queries))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_contexts_or_none(data in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Some((name, queries)) = parse_contexts(&data) {
                prop_assert_eq!(8 + name.len() + queries.iter().map(|q| 4 + q.len()).sum::<usize>(), data.len());
            }
        }
    }
}
