//! Random numbers of the operating system (rule 2).

use rustix::rand::{GetRandomFlags, getrandom};

use super::Nonces;
use crate::object::Nonce;

/// Nonces from the random numbers of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemNonces;

impl Nonces for SystemNonces {
    /// Waits for the operating system if it has no random numbers yet.
    fn draw(&self) -> Nonce {
        loop {
            let mut bytes = [0; 16];
            // A read of at most 256 bytes is never partial, and fails only by a signal that arrives before it starts.
            if getrandom(&mut bytes[..], GetRandomFlags::empty()) == Ok(bytes.len()) && bytes != [0; 16] {
                return Nonce(bytes);
            }
        }
    }
}
