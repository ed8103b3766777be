//! Random numbers from the operating system (rule 2).

use rustix::rand::{GetRandomFlags, getrandom};

use super::Nonces;
use crate::object::Nonce;

/// Draws nonces from the random numbers of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemNonces;

impl Nonces for SystemNonces {
    /// Draws a nonce. Blocks early in the boot of the machine, until the operating system has random numbers.
    fn draw(&self) -> Nonce {
        loop {
            let mut bytes = [0; 16];
            // A read of at most 256 bytes is never partial. It fails only if a signal arrives before it starts.
            if getrandom(&mut bytes[..], GetRandomFlags::empty()) == Ok(bytes.len()) && bytes != [0; 16] {
                return Nonce(bytes);
            }
        }
    }
}
