//! A helper for test devices that wrap another device. They implement the methods that differ, and forward
//! the others.

/// Implements methods of `Device` by calling the same method of the device in field `$inner`.
macro_rules! forward {
    ($inner:ident: $($method:ident)*) => {
        $(forward!(@$method $inner);)*
    };
    (@label $inner:ident) => {
        fn label(&self) -> String {
            self.$inner.label()
        }
    };
    (@allocate $inner:ident) => {
        fn allocate(&self, place: remanent::Place, len: u64) -> remanent::Result<remanent::device::MemoryId> {
            self.$inner.allocate(place, len)
        }
    };
    (@release $inner:ident) => {
        fn release(&self, memory: remanent::device::MemoryId) -> remanent::Result<()> {
            self.$inner.release(memory)
        }
    };
    (@staging $inner:ident) => {
        fn staging(&self, len: usize) -> remanent::Result<remanent::device::Staging> {
            self.$inner.staging(len)
        }
    };
    (@submit $inner:ident) => {
        fn submit(
            &self,
            lane: remanent::device::Lane,
            list: remanent::device::CommandList,
        ) -> remanent::Result<remanent::device::Pending> {
            self.$inner.submit(lane, list)
        }
    };
    (@reached $inner:ident) => {
        fn reached(&self, lane: remanent::device::Lane) -> u64 {
            self.$inner.reached(lane)
        }
    };
    (@wait $inner:ident) => {
        fn wait(&self, fence: remanent::device::Fence) -> remanent::Result<()> {
            self.$inner.wait(fence)
        }
    };
    (@after $inner:ident) => {
        fn after(&self, lane: remanent::device::Lane, fence: remanent::device::Fence) -> remanent::Result<()> {
            self.$inner.after(lane, fence)
        }
    };
    // Forward only streams, addresses and bytes. If other abilities were forwarded, callers would use the
    // inner device directly.
    (@places_and_abilities $inner:ident) => {
        fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(remanent::device::MemoryId) -> remanent::Place)) {
            self.$inner.read_places(read);
        }

        fn abilities(&self) -> remanent::device::Abilities<'_> {
            let remanent::device::Abilities { streams, addresses, bytes, .. } = self.$inner.abilities();
            remanent::device::Abilities { streams, addresses, bytes, ..Default::default() }
        }
    };
}
