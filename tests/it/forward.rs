//! Devices of tests that wrap another device: they implement what they do differently, and forward the rest.

/// The methods of `Device` that do nothing but call those of the device in field `$inner`.
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
    // The methods for callers' streams, and for looking at memory: no test's device does these differently.
    (@streams_and_memory $inner:ident) => {
        fn wait_external(
            &self,
            lane: remanent::device::Lane,
            stream: remanent::device::RawStream,
        ) -> remanent::Result<()> {
            self.$inner.wait_external(lane, stream)
        }

        fn signal_external(
            &self,
            stream: remanent::device::RawStream,
            fence: remanent::device::Fence,
        ) -> remanent::Result<()> {
            self.$inner.signal_external(stream, fence)
        }

        fn wait_stream(&self, stream: remanent::device::RawStream) -> remanent::Result<()> {
            self.$inner.wait_stream(stream)
        }

        fn gpu_of(&self, memory: remanent::device::MemoryId) -> Option<u32> {
            self.$inner.gpu_of(memory)
        }

        fn address(&self, memory: remanent::device::MemoryId) -> Option<u64> {
            self.$inner.address(memory)
        }

        fn bytes(&self, memory: remanent::device::MemoryId) -> Option<remanent::device::PageBytes> {
            self.$inner.bytes(memory)
        }
    };
}
