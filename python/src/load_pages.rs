//! Loads whole pages of a view into caller-owned memory, on the host or on a GPU, and checksums such memory.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::error::Refused;
use remanent::{DeviceChoice, Error, PageId, Result};

use crate::copiers::copier;
use crate::errors::{OrRaise, VIEW, invalid, memory_refused};
use crate::memory::{CudaBytes, Input, Output};
use crate::page_name::{PageName, iterable};
use crate::source::PastSource;

/// Reads whole pages into memory on `device`.
///
/// # Errors
/// `TypeError`, `ValueError`, `BufferError` for the memory, and errors of the store.
pub fn load_pages(view: &PastSource, pages: &Bound<'_, PyDict>, device: &str) -> PyResult<()> {
    let py = pages.py();
    let choice: DeviceChoice = device.parse().or_raise(py, None)?;
    if choice == DeviceChoice::Auto {
        return Err(invalid(
            "device must not be \"auto\", because the memory is on a certain device",
            "pass \"host\" or \"cuda:N\"",
        ));
    }
    let (mut on_host, mut on_gpu) = (Vec::new(), Vec::new());
    for item in pages.items() {
        let (page, memory): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let name = PageName::take(&page)?;
        match (Input::take_writable(&memory)?, choice) {
            (Input::Host(bytes), DeviceChoice::Host) => on_host.push((name, Output::of(bytes))),
            (Input::Cuda(bytes), DeviceChoice::Cuda(_)) => on_gpu.push((name, bytes)),
            _ => {
                return Err(memory_refused(
                    format!("the memory for {page} is not on {device}"),
                    "pass memory on that device, or another device",
                ));
            }
        }
    }
    let loaded = py.detach(|| match choice {
        DeviceChoice::Host => load_host(view, &mut on_host),
        _ => load_gpu(view, on_gpu, choice),
    });
    loaded.or_raise_of(py, Some(&view.path), VIEW)
}

fn load_host(view: &PastSource, pages: &mut [(PageName, Output)]) -> Result<()> {
    check_apart(pages)?;
    let view = view.get()?;
    let named = pages.iter_mut().map(|(name, memory)| Ok((name.find(&*view)?.page, memory.as_mut_slice())));
    view.read_pages(&mut named.collect::<Result<Vec<_>>>()?)
}

/// Returns an error if the memory of two pages overlaps, because several threads fill the memory
/// concurrently.
fn check_apart(pages: &[(PageName, Output)]) -> Result<()> {
    let mut ranges: Vec<_> = pages.iter().map(|(_, memory)| memory.addresses()).collect();
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    match ranges.windows(2).find(|pair| pair[1].start < pair[0].end) {
        None => Ok(()),
        Some(pair) => {
            let reason = "it overlaps other memory of the same call".to_owned();
            Err(Error::Refused(Refused::Memory { len: pair[1].len() as u64, reason }))
        }
    }
}

fn load_gpu(view: &PastSource, pages: Vec<(PageName, CudaBytes)>, device: DeviceChoice) -> Result<()> {
    let (view, copier) = (view.get()?, copier(device)?);
    let (mut named, mut adopted) = (Vec::new(), Vec::new());
    for (name, bytes) in pages {
        let page = name.find(&*view)?.page;
        if bytes.len() == 0 {
            // Empty memory has no address. It only fits an empty page.
            view.read_pages(&mut [(page, &mut [])])?;
            continue;
        }
        named.push(page);
        adopted.push(bytes.adopt_by(|memory| copier.caller_bytes(memory))?);
    }
    let pages: Vec<(PageId, _)> = named.into_iter().zip(&adopted).collect();
    copier.load(&view, &pages)
}

/// Returns the CRC-32 of each range of memory on `device`, a GPU.
///
/// # Errors
/// `TypeError`, `BufferError`, and errors of the device.
pub fn gpu_checksums(memory: &Bound<'_, PyAny>, device: &str) -> PyResult<Vec<u32>> {
    let py = memory.py();
    let choice: DeviceChoice = device.parse().or_raise(py, None)?;
    let mut ranges = Vec::new();
    for each in iterable(memory, "memory must be an iterable of tensors, such as a list")? {
        match Input::take(&each?)? {
            Input::Cuda(bytes) => ranges.push(bytes),
            Input::Host(_) => {
                return Err(memory_refused("the memory is on the host", "pass tensors on the GPU"));
            }
        }
    }
    let found = py.detach(|| {
        let copier = copier(choice)?;
        // Empty memory has no address. Its checksum is 0.
        let mut adopted = Vec::new();
        for bytes in ranges {
            let is_empty = bytes.len() == 0;
            let bytes =
                if is_empty { None } else { Some(bytes.adopt_by(|bytes| copier.caller_bytes(bytes))?) };
            adopted.push(bytes);
        }
        let mut sums = copier.checksums(&adopted.iter().flatten().collect::<Vec<_>>())?.into_iter();
        let of_each = adopted.iter().map(|bytes| bytes.as_ref().and_then(|_| sums.next()).unwrap_or(0));
        Ok(of_each.collect::<Vec<_>>())
    });
    found.or_raise(py, None)
}
