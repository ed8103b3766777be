// Runs kernels on the CPU: one block after the other, with the threads of a block as fibers.
//
// A fiber runs until it waits at a barrier or ends. A seed selects among the fibers that can run, so that
// results which depend on scheduling are found. A barrier that not all threads reach, or lanes of a warp that
// wait at different kinds of barrier, abort the process, because a GPU would hang or behave in an undefined
// way.

#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

Index threadIdx, blockIdx;

namespace {

using u32 = unsigned;
using u64 = unsigned long long;

constexpr size_t STACK_LEN = 64 << 10;
constexpr u32 THREADS_MAX = 1024;
constexpr u32 WARP = 32;

enum class State { Ready, AtWarpBarrier, AtBlockBarrier, Done };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_LEN]};
    State state = State::Done;
};

struct Launch {
    const char *name;
    void **arguments;
    void (*call)(void **arguments);
};

std::vector<Fiber> fibers(THREADS_MAX);
ucontext_t scheduler;
Launch launched;
u32 running;
u32 passed_on[THREADS_MAX];

// Whether this thread is executing a kernel, and whether the kernel accessed unmapped memory.
thread_local volatile bool in_kernel;
volatile bool faulted;
struct sigaction handler_before;

// A fault in a kernel ends the launch: execution returns to the scheduler's context, which includes the
// signal mask. Other faults are not handled here.
void on_fault(int signal, siginfo_t *info, void *context) {
    if (in_kernel) {
        faulted = true;
        setcontext(&scheduler);
    }
    if (handler_before.sa_flags & SA_SIGINFO) {
        handler_before.sa_sigaction(signal, info, context);
    } else {
        sigaction(signal, &handler_before, nullptr);
    }
}

void catch_faults() {
    static bool installed = false;
    if (!installed) {
        struct sigaction handler = {};
        handler.sa_sigaction = on_fault;
        handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &handler, &handler_before);
        installed = true;
    }
}

void thread_main() {
    launched.call(launched.arguments);
    fibers[running].state = State::Done;
    swapcontext(&fibers[running].context, &scheduler);
}

void wait_at(State barrier) {
    const u32 self = running;
    fibers[self].state = barrier;
    swapcontext(&fibers[self].context, &scheduler);
}

[[noreturn]] void stop(const char *what) {
    std::fprintf(stderr, "%s, block %u: %s\n", launched.name, blockIdx.x, what);
    std::abort();
}

// Releases the threads from `begin` to `end` if all of them wait at the same kind of barrier.
bool release(u32 begin, u32 end, State barrier) {
    for (u32 thread = begin; thread < end; thread++) {
        if (fibers[thread].state != barrier) {
            return false;
        }
    }
    for (u32 thread = begin; thread < end; thread++) {
        fibers[thread].state = State::Ready;
    }
    return true;
}

u64 next_random(u64 &state) {
    state += 0x9e3779b97f4a7c15;
    u64 mixed = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
}

void run_block(u32 threads, u64 &seed) {
    for (u32 thread = 0; thread < threads; thread++) {
        Fiber &fiber = fibers[thread];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_LEN;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, thread_main, 0);
        fiber.state = State::Ready;
    }
    std::vector<u32> ready(threads);
    for (;;) {
        ready.clear();
        bool waiting = false;
        for (u32 thread = 0; thread < threads; thread++) {
            if (fibers[thread].state == State::Ready) {
                ready.push_back(thread);
            }
            waiting |= fibers[thread].state != State::Done;
        }
        if (!waiting) {
            return;
        }
        for (size_t left = ready.size(); left > 0; left--) {
            std::swap(ready[left - 1], ready[next_random(seed) % left]);
            running = ready[left - 1];
            threadIdx.x = running;
            in_kernel = true;
            swapcontext(&scheduler, &fibers[running].context);
            in_kernel = false;
            if (faulted) {
                return;
            }
        }
        bool released = release(0, threads, State::AtBlockBarrier);
        for (u32 warp = 0; warp < threads; warp += WARP) {
            released |= release(warp, warp + WARP < threads ? warp + WARP : threads, State::AtWarpBarrier);
        }
        bool ended = true;
        for (u32 thread = 0; thread < threads; thread++) {
            ended &= fibers[thread].state == State::Done;
        }
        if (!released && !ended) {
            stop("a barrier that not all threads reach");
        }
    }
}

} // namespace

void __syncthreads() {
    wait_at(State::AtBlockBarrier);
}

void __syncwarp() {
    wait_at(State::AtWarpBarrier);
}

unsigned exchange(unsigned value, unsigned lane) {
    const u32 self = running;
    passed_on[self] = value;
    __syncwarp();
    const unsigned result = lane < WARP ? passed_on[self / WARP * WARP + lane] : value;
    // No lane stores its next value before every lane has read this one.
    __syncwarp();
    return result;
}

extern "C" {
void apply_by_warp(const void *, u32, const void *);
void apply_by_block(const void *, u32, const void *);
void crc_chunks(const void *, u32);
void crc_combine(const void *, u32);
void diff(const void *, u32);
void digest(const void *, u32);
void select_count(const void *, u32);
void select_scan(const void *, u32);
void select_emit(const void *, u32);
void validate(const void *, u32);
}

namespace {

template <void KERNEL(const void *, u32)>
void call(void **arguments) {
    KERNEL(*static_cast<const void **>(arguments[0]), *static_cast<u32 *>(arguments[1]));
}

template <void KERNEL(const void *, u32, const void *)>
void call(void **arguments) {
    KERNEL(*static_cast<const void **>(arguments[0]), *static_cast<u32 *>(arguments[1]),
           *static_cast<const void **>(arguments[2]));
}

const struct {
    const char *name;
    void (*call)(void **arguments);
} KERNELS[] = {
    {"apply_by_warp", call<apply_by_warp>}, {"apply_by_block", call<apply_by_block>},
    {"crc_chunks", call<crc_chunks>},       {"crc_combine", call<crc_combine>},
    {"diff", call<diff>},                   {"digest", call<digest>},
    {"select_count", call<select_count>},   {"select_scan", call<select_scan>},
    {"select_emit", call<select_emit>},     {"validate", call<validate>},
};

} // namespace

// Launches a kernel by its name and waits for its end. Returns 0 on success, -1 if there is no such kernel,
// and -2 if it accessed unmapped memory. The arguments are pointers to the values, as for the driver. Only
// one launch may run at a time.
extern "C" int launch_on_cpu(const char *name, u32 blocks, u32 threads, void **arguments, u64 seed) {
    for (const auto &kernel : KERNELS) {
        if (std::strcmp(kernel.name, name) != 0) {
            continue;
        }
        catch_faults();
        launched = {kernel.name, arguments, kernel.call};
        faulted = false;
        for (u32 block = 0; block < blocks && !faulted; block++) {
            blockIdx.x = block;
            run_block(threads, seed);
        }
        return faulted ? -2 : 0;
    }
    return -1;
}
