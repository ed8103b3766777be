//! Failing calls of the simulated library, and transfers that never end.

use remanent::nixl::{Agent, HostBuffer, NixlError, Peer, Region};
use remanent::{DeviceChoice, Error, Place, Result, Store};

use crate::ground::{Ground, connect, failure, page, sent, settings, store};

/// Functions whose failures are returned to the caller.
const REPORTED: [&str; 25] = [
    "nixl_capi_create_configured_agent",
    "nixl_capi_create_params",
    "nixl_capi_params_add",
    "nixl_capi_create_backend",
    "nixl_capi_get_local_md",
    "nixl_capi_load_remote_md",
    "nixl_capi_create_reg_dlist",
    "nixl_capi_reg_dlist_add_desc",
    "nixl_capi_register_mem",
    "nixl_capi_create_xfer_dlist",
    "nixl_capi_xfer_dlist_add_desc",
    "nixl_capi_create_opt_args",
    "nixl_capi_opt_args_set_notif_msg",
    "nixl_capi_opt_args_set_has_notif",
    "nixl_capi_create_xfer_req",
    "nixl_capi_post_xfer_req",
    "nixl_capi_get_xfer_status",
    "nixl_capi_gen_notif",
    "nixl_capi_create_notif_map",
    "nixl_capi_get_notifs",
    "nixl_capi_notif_map_size",
    "nixl_capi_notif_map_get_agent_at",
    "nixl_capi_notif_map_get_notifs_size",
    "nixl_capi_notif_map_get_notif",
    "nixl_capi_invalidate_remote_md",
];

/// Functions that free an object. Their failures are not returned, and at most leak the object.
const FREEING: [&str; 10] = [
    "nixl_capi_destroy_params",
    "nixl_capi_destroy_backend",
    "nixl_capi_destroy_opt_args",
    "nixl_capi_destroy_reg_dlist",
    "nixl_capi_destroy_xfer_dlist",
    "nixl_capi_release_xfer_req",
    "nixl_capi_destroy_xfer_req",
    "nixl_capi_destroy_notif_map",
    "nixl_capi_deregister_mem",
    "nixl_capi_destroy_agent",
];

/// Calls every function of the library.
fn call_every_function(ground: &Ground, store: &Store, id: remanent::PageId) -> Result<Vec<u8>> {
    let owner = ground.nixl.agent(&settings("owner"))?;
    let reader = ground.nixl.agent(&settings("reader"))?;
    let source = owner.register(store.lease(id)?)?;
    let buffer = HostBuffer::new(64)?;
    let target = reader.register(buffer.clone())?;
    let to_reader = owner.load_peer(&reader.metadata()?)?;
    let copy = [(source.range(0, 64)?, target.describe().range(0, 64)?)];
    owner.write(&to_reader, &copy, Some(b"written"))?.wait()?;
    owner.notify(&to_reader, b"hello")?;
    assert_eq!(reader.notifications()?.len(), 2);
    owner.forget_peer(&to_reader)?;
    let mut bytes = vec![0; 64];
    buffer.read(0, &mut bytes)?;
    Ok(bytes)
}

#[test]
fn each_failing_call_is_reported_and_frees_everything() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let id = page(&store, &[9; 64], Place::Host);
    let before = ground.alive();
    for calls in [0, 1] {
        ground.delay(calls);
        for call in REPORTED.into_iter().filter(|call| calls > 0 || !call.ends_with("xfer_status")) {
            ground.arm(call, -2);
            let error = failure(call_every_function(ground, &store, id));
            assert!(ground.disarm(), "{call} was not called");
            let NixlError::Failed { call: failed, status: -2, .. } = error else {
                panic!("{call}: {error:?}")
            };
            assert_eq!(failed, call);
            assert_eq!(ground.alive(), before, "{call} leaks");
            assert!(store.pin(id).is_ok(), "{call} leaves the page leased");
        }
        assert_eq!(call_every_function(ground, &store, id).unwrap(), [9; 64]);
        assert_eq!(ground.alive(), before);
    }
}

#[test]
fn failed_free_is_ignored_and_never_frees_early() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    for call in FREEING {
        let id = page(&store, &[9; 64], Place::Host);
        ground.arm(call, -2);
        assert_eq!(call_every_function(ground, &store, id).unwrap(), [9; 64], "{call}");
        assert!(ground.disarm(), "{call} was not called");
        // The region that is dropped first is the buffer of the reader. The registration of the page has ended.
        assert!(store.pin(id).is_ok(), "{call}");
    }
    // If its registration cannot be ended, a page stays leased.
    let id = page(&store, &[9; 64], Place::Host);
    let agent = ground.agent("owner");
    let region = agent.register(store.lease(id).unwrap()).unwrap();
    ground.arm("nixl_capi_deregister_mem", -2);
    drop(region);
    assert!(ground.disarm() && matches!(store.pin(id), Err(Error::Leased { .. })));
}

/// Returns two agents, a registered page of the first one and a registered buffer of the second one.
fn pair<'s>(
    ground: &Ground,
    store: &'s Store,
    id: remanent::PageId,
) -> (Agent, Peer, Region<remanent::Lease<'s>>, Region<HostBuffer>, Agent) {
    let (owner, reader) = (ground.agent("owner"), ground.agent("reader"));
    let source = owner.register(store.lease(id).unwrap()).unwrap();
    let target = reader.register(HostBuffer::new(64).unwrap()).unwrap();
    let (_, to_reader) = connect(&owner, &reader);
    (owner, to_reader, source, target, reader)
}

#[test]
fn timed_out_transfer_keeps_the_page_leased() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    for is_waited in [true, false] {
        let id = page(&store, &[9; 64], Place::Host);
        let (owner, to_reader, source, target, _reader) = pair(ground, &store, id);
        ground.delay(u64::MAX);
        let copy = [(source.range(0, 64).unwrap(), sent(&target).range(0, 64).unwrap())];
        let transfer = owner.write(&to_reader, &copy, None).unwrap();
        if is_waited {
            let error = failure(transfer.wait());
            assert!(
                matches!(&error, NixlError::TimedOut { peer, .. } if peer == to_reader.name()),
                "{error}"
            );
        } else {
            drop(transfer);
        }
        drop((copy, source));
        assert!(matches!(store.pin(id), Err(Error::Leased { .. })));
        ground.delay(0);
    }
}

#[test]
fn failed_transfer_releases_lease_and_agent_continues() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let id = page(&store, &[9; 64], Place::Host);
    let (owner, to_reader, source, target, reader) = pair(ground, &store, id);
    let copy = || [(source.range(0, 64).unwrap(), sent(&target).range(0, 64).unwrap())];
    ground.delay(3);
    ground.arm("nixl_capi_get_xfer_status", -2);
    assert!(matches!(
        failure(owner.write(&to_reader, &copy(), None).unwrap().wait()),
        NixlError::Failed { .. }
    ));
    owner.write(&to_reader, &copy(), Some(b"again")).unwrap().wait().unwrap();
    assert_eq!(reader.notifications().unwrap().len(), 1);
    drop(source);
    assert!(store.pin(id).is_ok());
}

#[test]
fn forked_child_cannot_use_or_free_agents() {
    let (ground, _turn) = Ground::get();
    let store = store(DeviceChoice::Host);
    let id = page(&store, &[9; 64], Place::Host);
    let (owner, to_reader, source, target, reader) = pair(ground, &store, id);
    ground.delay(2);
    let copy = [(source.range(0, 64).unwrap(), sent(&target).range(0, 64).unwrap())];
    let transfer = owner.write(&to_reader, &copy, None).unwrap();
    // SAFETY: the child only calls this crate and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_forked = |result: Result<()>| matches!(result, Err(Error::Forked { .. }));
        let before = ground.alive();
        let mut is_correct = is_forked(owner.notify(&to_reader, b"child"))
            && is_forked(owner.metadata().map(|_| ()))
            && is_forked(owner.notifications().map(|_| ()))
            && is_forked(owner.write(&to_reader, &copy, None).map(|_| ()))
            && is_forked(owner.register(HostBuffer::new(8).unwrap()).map(|_| ()))
            && is_forked(transfer.wait());
        drop((copy, source, target, owner, reader));
        is_correct &= ground.alive() == before;
        // SAFETY: the child ends without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!is_correct)) };
    }
    let mut status = 0;
    // SAFETY: the pointer points to a live number.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child used the parent's agents");
    transfer.wait().unwrap();
}
