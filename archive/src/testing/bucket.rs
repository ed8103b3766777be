//! A simulated bucket with the faults of object stores and their clients.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::world::{Effect, ProcessId, SharedWorld};
use crate::bucket::{Bucket, BucketError, Creation, FailureClass};
use crate::line::Nonces;
use crate::object::{Folder, Nonce, ObjectKey};

/// A process's access to the bucket. Each request yields to the scheduler once or twice.
#[derive(Clone, Debug)]
pub struct SimBucket {
    /// The shared state.
    pub world: SharedWorld,
    /// The number of the process.
    pub process: ProcessId,
    /// The machine of the process. Its application continues while a request waits.
    pub machine: Option<usize>,
    /// Whether the bucket ignores the condition of creates, as some servers do.
    pub ignores_condition: bool,
}

/// Yields to the scheduler once.
pub fn reschedule() -> impl Future<Output = ()> {
    Reschedule(false)
}

struct Reschedule(bool);

impl Future for Reschedule {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.0, true) {
            return Poll::Ready(());
        }
        // Futures that poll several requests poll only those that were woken.
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

fn failure(class: FailureClass, message: &str) -> BucketError {
    BucketError { class, message: message.to_owned() }
}

impl SimBucket {
    fn share(&self) -> f64 {
        let mut world = self.world.borrow_mut();
        if world.is_calm { 0.5 } else { world.rng.share() }
    }

    fn chance(&self, probability: f64) -> bool {
        let mut world = self.world.borrow_mut();
        !world.is_calm && world.rng.chance(probability)
    }

    /// Sends a request, and returns its effect. If the process is killed before the request takes effect, the request
    /// may take effect later.
    async fn send(&self, effect: Effect) -> Effect {
        self.world.borrow_mut().in_flight.insert(self.process, effect.clone());
        reschedule().await;
        self.world.borrow_mut().in_flight.remove(&self.process);
        effect
    }

    fn apply(&self, effect: &Effect) -> Creation {
        let mut world = self.world.borrow_mut();
        if let (true, Effect::Create(key, bytes, _)) = (self.ignores_condition, effect) {
            world.apply(&Effect::Put(*key, bytes.clone()));
            return Creation::Created;
        }
        if world.apply(effect) { Creation::Created } else { Creation::Exists }
    }
}

impl Bucket for SimBucket {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        let effect = self.send(Effect::Create(key, bytes.into(), self.process)).await;
        let share = self.share();
        let outcome = match share {
            ..0.80 => Ok(self.apply(&effect)),
            ..0.85 => {
                self.apply(&effect);
                Err(failure(FailureClass::InDoubt, "time-out after success"))
            }
            ..0.88 => Err(failure(FailureClass::InDoubt, "time-out, never arrived")),
            ..0.92 => {
                self.world.borrow_mut().zombies.push(effect);
                Err(failure(FailureClass::InDoubt, "time-out, arrives later or never"))
            }
            ..0.94 => Ok(Creation::Exists), // A conflict (409): nothing was written.
            ..0.96 => Err(failure(FailureClass::Throttled, "429")),
            _ => {
                // A 500 after the object was created. The client retried the request.
                self.apply(&effect);
                Ok(self.apply(&effect))
            }
        };
        // In a bucket without faults, this is the point at which a test can stall a process.
        let is_calm = self.world.borrow().is_calm;
        if is_calm || self.chance(0.5) {
            reschedule().await;
        }
        outcome
    }

    async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
        let effect = self.send(Effect::Put(key, bytes.into())).await;
        if self.chance(0.2) {
            self.world.borrow_mut().zombies.push(effect);
            return Err(failure(FailureClass::InDoubt, "time-out"));
        }
        self.apply(&effect);
        Ok(())
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        if self.chance(0.4) {
            reschedule().await;
        }
        if self.chance(0.02) {
            return Err(failure(FailureClass::Unreachable, "the connection ended before the last byte"));
        }
        let found = self.world.borrow().objects.get(&key).cloned();
        let clipped = |bytes: &[u8]| match &range {
            Some(range) => bytes[range.start as usize..(range.end as usize).min(bytes.len())].to_vec(),
            None => bytes.to_vec(),
        };
        Ok(found.as_deref().map(clipped))
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        if self.chance(0.4) {
            reschedule().await;
        }
        let keys = self.world.borrow_mut().listing();
        let names = keys.iter().map(ToString::to_string);
        Ok(names.filter(|name| name.starts_with(folder.name())).collect())
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        let effect = Effect::Delete(key);
        if self.chance(0.5) {
            self.send(effect.clone()).await;
        }
        let is_locked = self.world.borrow().locks_data && matches!(key, ObjectKey::Data(_));
        if is_locked || self.chance(0.02) {
            return Err(failure(FailureClass::Denied, "403"));
        }
        if self.chance(0.1) {
            self.world.borrow_mut().zombies.push(effect.clone()); // The effect takes place again later.
        }
        self.apply(&effect);
        Ok(())
    }

    /// Yields to the scheduler while the application of the machine continues. In rare cases, returns false, so that
    /// the caller gives up.
    async fn pause(&self, _attempt: u32, failure: &BucketError) -> bool {
        reschedule().await;
        if failure.class == FailureClass::Denied {
            return false;
        }
        if self.chance(0.2) {
            let mut world = self.world.borrow_mut();
            let token = world.draw();
            if let Some(store) = self.machine.and_then(|machine| world.machines[machine].as_mut()) {
                store.commit(token);
                store.seal();
            }
        }
        !self.chance(0.02)
    }
}

impl Nonces for SimBucket {
    fn draw(&self) -> Nonce {
        let number = self.world.borrow_mut().draw();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        Nonce(bytes)
    }
}
