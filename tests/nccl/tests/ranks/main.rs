//! Ranks that exchange bytes of stores by NCCL: on the simulated driver and library, or with `REMANENT_ON_GPUS=1` on two
//! GPUs and the machine's library.

mod agreement;
mod collectives;
mod failures;
mod gather;
mod ground;
mod loading;
