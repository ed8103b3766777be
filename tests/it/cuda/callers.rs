//! Caller-owned memory is accepted if the driver reports it as memory of this GPU, and rejected otherwise.

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::host::HostDevice;
use remanent::device::multi::MultiDevice;
use remanent::device::{CallerMemory, Command, CommandList, Device, KernelAddresses, Lane, Span};
use remanent::error::Refused;
use remanent::testing::faulty_device::FaultyDevice;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, Place, Store};

use super::{PLACE, content};
use crate::gpu;

#[test]
fn caller_memory_is_used_in_place_if_known_to_driver() {
    let Some(gpu) = gpu::device() else { return };
    let Some(callers) = gpu::device() else { return };
    let disk = SimDisk::new();
    let store = Store::open_on(Arc::new(disk), gpu, Options::new()).unwrap();
    let mut batch = store.batch();
    batch.create_from(vec![0; 4096], PLACE);
    let page = store.commit(batch).unwrap().pages[0];
    for (place, content) in [(PLACE, 5), (Place::Pinned, 6)] {
        let memory = callers.allocate(place, 8192).unwrap();
        let address = callers.address(memory).unwrap();
        // SAFETY: the device keeps the memory until it is released below.
        let adopt = |address, len| store.caller_bytes(&unsafe { CallerMemory::from_cuda(address, len, ()) });
        let bytes = adopt(address + 16, 4096).unwrap();
        assert_eq!((bytes.place(), bytes.address()), (place, Some(address + 16)));
        bytes.write(0, &[content; 4096]).unwrap();
        let mut batch = store.batch();
        batch.write_device(page, 0, &bytes);
        store.commit(batch).unwrap();
        let mut found = vec![0; 4096];
        store.read(page, 0, &mut found).unwrap();
        assert!(found == [content; 4096]);
        drop(bytes);

        let local = Box::new([0_u8; 64]);
        for (what, address, len) in [
            ("longer than all memory", address, u64::MAX),
            ("nowhere", 64, 64),
            ("of no device", local.as_ptr() as u64, 64),
            ("empty", address, 0),
        ] {
            let refused = adopt(address, len).unwrap_err();
            assert!(matches!(refused, Error::Refused(Refused::Memory { .. })), "{what}: {refused}");
        }
        // The memory remains the owner's, so the store allocates none of its own memory there.
        let own = store.device_bytes(4096, place).unwrap();
        assert_ne!(own.address(), Some(address + 16));
        callers.release(memory).unwrap();
    }
}

#[test]
fn memory_of_another_gpu_is_refused() {
    let Some([one, other]) = gpu::two() else { return };
    let store = Store::open_on(Arc::new(SimDisk::new()), one, Options::new()).unwrap();
    let memory = other.allocate(PLACE, 4096).unwrap();
    let address = other.abilities().addresses.unwrap().address(memory).unwrap();
    // SAFETY: the device keeps the memory until it is released below.
    let refused = store.caller_bytes(&unsafe { CallerMemory::from_cuda(address, 4096, ()) }).unwrap_err();
    assert!(matches!(refused, Error::Refused(Refused::Memory { .. })), "{refused}");
    other.release(memory).unwrap();
}

#[test]
fn wrapped_gpu_accepts_caller_memory() {
    let (Some(gpu), Some(callers)) = (gpu::device(), gpu::device()) else { return };
    let gpu: Arc<dyn Device> = gpu;
    let host: Arc<dyn Device> = Arc::new(HostDevice::new());
    let wrapped: [(Arc<dyn Device>, Place); 3] = [
        (Arc::new(LateDevice::seeded(gpu.clone(), 1)), Place::Device(0)),
        (Arc::new(FaultyDevice::new(gpu.clone())), Place::Device(0)),
        (Arc::new(MultiDevice::new(vec![host, gpu])), Place::Device(1)),
    ];
    for (device, place) in wrapped {
        let memory = callers.allocate(PLACE, 64).unwrap();
        let address = callers.address(memory).unwrap();
        let lent = device.abilities().lent.expect("all these devices adopt memory");
        // SAFETY: the device keeps the memory until it is released below.
        let (adopted, found) = lent.adopt(&unsafe { CallerMemory::from_cuda(address, 64, ()) }).unwrap();
        assert_eq!(found, place, "{}", device.label());
        let target = Span { memory: adopted, offset: 0, len: 64 };
        let fill = Command::Fill { target, pattern: [7; 16], width: Width::W1 };
        let list = CommandList { commands: vec![fill], staging: vec![] };
        device.submit(Lane::Apply, list).unwrap().finish(&*device).unwrap();
        assert_eq!(content(&*callers, memory, 64), [7; 64], "{}", device.label());
        // SAFETY: no command reads this memory.
        let nowhere = unsafe { CallerMemory::from_cuda(64, 64, ()) };
        let refused = lent.adopt(&nowhere).unwrap_err();
        assert!(matches!(refused, Error::Refused(Refused::Memory { .. })), "{refused}");
        device.release(adopted).unwrap();
        callers.release(memory).unwrap();
    }
}

#[test]
fn memory_across_mappings_is_accepted() {
    let (Some(gpu), Some(caller)) = (gpu::device(), gpu::Caller::new()) else { return };
    let segment = caller.segment(3, 4);
    let store = Store::open_on(Arc::new(SimDisk::new()), gpu, Options::new()).unwrap();
    // SAFETY: the segment exists until the end of the test.
    let adopt = |address, len| store.caller_bytes(&unsafe { CallerMemory::from_cuda(address, len, ()) });
    let (mapped, within) = (3 * gpu::MAPPING_LEN, 1000);
    let bytes = adopt(segment.address + within, mapped - within).unwrap();
    let content: Vec<u8> = (0..bytes.byte_len()).map(|at| (at / 777) as u8).collect();
    bytes.write(0, &content).unwrap();
    let mut batch = store.batch();
    let page = batch.create(content.len() as u64, PLACE).page();
    batch.write_device(page, 0, &bytes);
    let page = store.commit(batch).unwrap().pages[0];
    assert!(store.read_to_vec(page).unwrap() == content);
    // After the last mapping, the addresses are reserved but there is no memory.
    let refused = adopt(segment.address + within, mapped).unwrap_err();
    assert!(refused.to_string().contains(&format!("has {} bytes", mapped - within)), "{refused}");
}
