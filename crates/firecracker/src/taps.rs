//! The tap devices of a restored VM's network cards.
//!
//! ```text
//!   restore     the taps of the checkpoint, or those that the user chose: each must be there, and free
//!   clones      a pattern for each card: tap%d is tap1, tap2, ...
//!   rehearsal   taps with the checkpoint's names in a network namespace of the second Firecracker
//! ```
//!
//! Firecracker makes a tap that is missing, if it has the right to: one without an address, which
//! leads nowhere. So a missing tap is an error here.

use crate::config::NetworkInterface;
use crate::{Error, Result};
use keyframe_kernel::isolated_tap::start_among_isolated_taps;
use keyframe_vmm::TapChoice;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
use std::process::Command;

/// What a pattern of a tap has in place of the clone's number.
const NUMBER: &str = "%d";

/// A network card of a checkpoint's VM, and its tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taps {
    /// The tap of each card.
    cards: Vec<TapChoice>,
    /// Those of them that the user chose.
    chosen: Vec<TapChoice>,
}

impl Taps {
    /// Gives the cards of `network` their own taps, or those of `chosen`. Error: there is no such
    /// card, or two cards have one tap.
    pub fn choose(network: &[NetworkInterface], chosen: &[TapChoice]) -> Result<Self> {
        let names = || network.iter().map(|card| &*card.iface_id).collect::<Vec<_>>().join(", ");
        let mut cards: Vec<TapChoice> = network
            .iter()
            .map(|card| TapChoice { card: card.iface_id.clone(), tap: card.host_dev_name.clone() })
            .collect();
        for choice in chosen {
            let card = cards.iter_mut().find(|card| card.card == choice.card);
            let card = card.ok_or_else(|| Error::Restore {
                problem: format!("the checkpoint's VM has no network card {}", choice.card),
                fix: match network {
                    [] => "leave out --tap".into(),
                    _ => format!("name one of its cards: {}", names()),
                },
            })?;
            card.tap.clone_from(&choice.tap);
        }
        let taps = Self { cards, chosen: chosen.to_vec() };
        taps.require_different()?;
        Ok(taps)
    }

    fn require_different(&self) -> Result<()> {
        for (at, TapChoice { card, tap }) in self.cards.iter().enumerate() {
            let earlier = self.cards.iter().take(at).find(|earlier| earlier.tap == *tap);
            if let Some(earlier) = earlier {
                return Err(Error::Restore {
                    problem: format!(
                        "network cards {} and {card} have one tap, {tap}",
                        earlier.card
                    ),
                    fix: format!("choose another tap for one of them: --tap {card}=TAP"),
                });
            }
        }
        Ok(())
    }

    /// Returns the taps of the clone with the number `number`, one of `count`. Error: several clones would have one tap.
    pub fn of_clone(&self, number: u32, count: usize) -> Result<Self> {
        let shared = self.cards.iter().find(|card| count > 1 && !card.tap.contains(NUMBER));
        if let Some(TapChoice { card, tap }) = shared {
            return Err(Error::Restore {
                problem: format!(
                    "{count} clones cannot share {tap}, the tap of network card {card}"
                ),
                fix: format!(
                    "give each clone a tap of its own: --tap {card}=tap%d stands for tap1, tap2, ..."
                ),
            });
        }
        let number = |choices: &[TapChoice]| {
            let numbered = |TapChoice { card, tap }: &TapChoice| TapChoice {
                card: card.clone(),
                tap: tap.replace(NUMBER, &number.to_string()),
            };
            choices.iter().map(numbered).collect()
        };
        Ok(Self { cards: number(&self.cards), chosen: number(&self.chosen) })
    }

    /// Returns the taps that the user chose.
    pub fn chosen(&self) -> &[TapChoice] {
        &self.chosen
    }

    /// Checks that all taps are there. Error: one is missing.
    pub fn require_present(&self) -> Result<()> {
        let socket = match &*self.cards {
            [] => return Ok(()),
            _ => socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
                .map_err(Error::io("look for the taps of the VM"))?,
        };
        for TapChoice { card, tap } in &self.cards {
            match netdevice::name_to_index(&socket, tap) {
                Ok(_) => {}
                Err(Errno::NODEV) => {
                    return Err(Error::Restore {
                        problem: format!("{tap}, the tap of network card {card}, is missing"),
                        fix: format!(
                            "make it: ip tuntap add {tap} mode tap; or choose another: --tap {card}=TAP"
                        ),
                    });
                }
                Err(e) => return Err(Error::io(format!("look for the tap {tap}"))(e)),
            }
        }
        Ok(())
    }

    /// Makes the child of `command` start where it has these taps for itself. Error: they cannot be
    /// made, with the fix.
    pub fn isolate(&self, command: &mut Command) -> Result<()> {
        let names: Vec<&str> = self.cards.iter().map(|card| &*card.tap).collect();
        if names.is_empty() {
            return Ok(());
        }
        start_among_isolated_taps(command, &names).map_err(|error| Error::Restore {
            problem: format!(
                "a second Firecracker beside the VM needs taps in a network namespace of its own, \
                 and they cannot be made: {error}"
            ),
            fix: "run keyframe as root, on a kernel that has namespaces".into(),
        })
    }

    /// Returns the error of a Firecracker that says `message` when it loads the VM: a tap that
    /// cannot be opened, or any other reason.
    pub fn not_loaded(&self, message: String) -> Error {
        let is_busy = message.contains("os error 16");
        // Firecracker names the tap.
        let named = self.cards.iter().find(|card| {
            let words = message.split(|c: char| c.is_whitespace() || ",;:()'\"".contains(c));
            words.map(|word| word.trim_end_matches('.')).any(|word| word == card.tap)
        });
        match named {
            Some(TapChoice { card, tap }) if is_busy => Error::Restore {
                problem: format!("{tap}, the tap of network card {card}, is in use by another VM"),
                fix: format!("end that VM, or choose another tap: --tap {card}=TAP"),
            },
            Some(TapChoice { card, tap }) if message.contains("TUN/TAP") => Error::Restore {
                problem: format!(
                    "Firecracker cannot open {tap}, the tap of network card {card}: {message}"
                ),
                fix: format!(
                    "make it for this user: ip tuntap add {tap} mode tap user USER; or choose \
                     another: --tap {card}=TAP"
                ),
            },
            _ => Error::NotLoaded { message },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(cards: &[(&str, &str)]) -> Vec<NetworkInterface> {
        let card = |(id, tap): &(&str, &str)| NetworkInterface {
            iface_id: (*id).into(),
            host_dev_name: (*tap).into(),
        };
        cards.iter().map(card).collect()
    }

    fn choice(text: &str) -> TapChoice {
        text.parse().unwrap()
    }

    #[test]
    fn a_card_gets_the_tap_that_the_user_chose() {
        let network = network(&[("eth0", "tap0"), ("eth1", "tap1")]);
        let taps = Taps::choose(&network, &[choice("eth1=tap7")]).unwrap();
        assert_eq!(taps.cards, [choice("eth0=tap0"), choice("eth1=tap7")]);
        assert_eq!(taps.chosen(), [choice("eth1=tap7")]);
        for bad in [&["eth2=tap2"][..], &["eth1=tap0"], &["eth0=x", "eth1=x"]] {
            let chosen: Vec<_> = bad.iter().map(|text| choice(text)).collect();
            assert!(Taps::choose(&network, &chosen).unwrap_err().fix().is_some(), "{bad:?}");
        }
        assert!(Taps::choose(&[], &[choice("eth0=x")]).is_err());
        for bad in ["eth0", "=x", "eth0="] {
            assert!(bad.parse::<TapChoice>().is_err(), "{bad}");
        }
    }

    #[test]
    fn each_clone_has_a_tap_of_its_own() {
        let network = network(&[("eth0", "tap0")]);
        let taps = Taps::choose(&network, &[choice("eth0=kf%d")]).unwrap();
        assert_eq!(taps.of_clone(3, 4).unwrap().chosen(), [choice("eth0=kf3")]);
        let same = Taps::choose(&network, &[]).unwrap();
        assert!(same.of_clone(1, 2).unwrap_err().to_string().contains("share tap0"));
        assert_eq!(same.of_clone(1, 1).unwrap(), same);
        assert!(Taps::choose(&[], &[]).unwrap().of_clone(2, 2).is_ok());
    }

    #[test]
    fn a_missing_tap_is_named_with_the_fix() {
        let taps = Taps::choose(&network(&[("eth0", "kfnotthere")]), &[]).unwrap();
        let error = taps.require_present().unwrap_err();
        assert!(error.to_string().contains("kfnotthere"), "{error}");
        assert!(error.fix().unwrap().contains("ip tuntap add kfnotthere"));
        let there = Taps::choose(&network(&[("eth0", "lo")]), &[]).unwrap();
        there.require_present().unwrap();
    }
}
