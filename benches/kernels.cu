// Measures the committed machine code of the kernels on a GPU of compute capability 9.0, and compares the results
// with plain loops on the CPU.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 -o kernels-bench benches/kernels.cu -lcuda
//     ./kernels-bench kernels/compiled
//
// Shares refer to ceilings of the same run: a device copy (bytes read and written), or a kernel that only reads. A
// figure is the median of several launches, each between two events.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../kernels/common.cuh"

#define MUST(call)                                                                                                 \
    do {                                                                                                           \
        if (int code = int(call)) {                                                                                \
            std::printf("line %d: %s returned %d\n", __LINE__, #call, code);                                       \
            std::exit(1);                                                                                          \
        }                                                                                                          \
    } while (0)

// Use less and fewer under a sanitizer: -DLEN=268435456 -DLAUNCHES=1. The figures then mean nothing.
#ifndef LEN
#define LEN (1ull << 30)
#endif
#ifndef LAUNCHES
#define LAUNCHES 13
#endif

constexpr u64 GIB = LEN;
constexpr u64 PAGE = 16 << 10;

__global__ void read_only(const uint4 *from, u64 count, u32 *sink) {
    u32 sum = 0;
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 stride = u64(gridDim.x) * blockDim.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (sum == 0x12345678) {
        *sink = sum;
    }
}

static cudaStream_t stream;
static double copy_ceiling, read_ceiling;
static bool all_right = true;

static CUfunction load(const std::string &folder, const char *module, const char *name) {
    CUmodule loaded;
    MUST(cuModuleLoad(&loaded, (folder + "/" + module + ".sm_90.cubin").c_str()));
    CUfunction function;
    MUST(cuModuleGetFunction(&function, loaded, name));
    return function;
}

// Returns the median time of a launch in seconds.
static double seconds(const std::function<void()> &launch) {
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < LAUNCHES; i++) {
        MUST(cudaEventRecord(begin, stream));
        launch();
        MUST(cudaEventRecord(end, stream));
        MUST(cudaStreamSynchronize(stream));
        float ms;
        MUST(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3 || LAUNCHES <= 3) {
            times.push_back(ms);
        }
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] / 1e3;
}

static void report(const char *what, double bytes, double time, double ceiling) {
    std::printf("%-58s %9.1f us %7.2f TB/s", what, time * 1e6, bytes / time / 1e12);
    if (ceiling > 0) {
        std::printf(" %5.1f %%", 100 * bytes / time / ceiling);
    }
    std::printf("\n");
}

static void check(const char *what, bool right) {
    if (!right) {
        std::printf("WRONG: %s\n", what);
        all_right = false;
    }
}

template <typename Row>
struct Table {
    Row *rows;
    u32 count;
    explicit Table(const std::vector<Row> &from, bool mapped = false) : count(from.size()) {
        const size_t bytes = std::max<size_t>(1, from.size()) * sizeof(Row);
        if (mapped) {
            MUST(cudaHostAlloc(&rows, bytes, cudaHostAllocMapped));
            std::memcpy(rows, from.data(), from.size() * sizeof(Row));
        } else {
            MUST(cudaMalloc(&rows, bytes));
            MUST(cudaMemcpy(rows, from.data(), from.size() * sizeof(Row), cudaMemcpyHostToDevice));
        }
    }
};

template <typename Row>
static void launch(CUfunction kernel, u32 threads, u32 rows_per_block, const Table<Row> &rows,
                   const PieceRow *pieces = nullptr) {
    const void *table = rows.rows;
    u32 count = rows.count;
    void *arguments[] = {&table, &count, &pieces};
    MUST(cuLaunchKernel(kernel, (count + rows_per_block - 1) / rows_per_block, 1, 1, threads, 1, 1, 0, stream,
                        arguments, nullptr));
}

static std::vector<PartRow> cut(u32 piece, u64 steps, u64 part) {
    std::vector<PartRow> parts;
    for (u64 begin = 0; begin < steps; begin += part) {
        parts.push_back({piece, 1, begin, std::min(begin + part, steps)});
    }
    return parts;
}

static std::vector<u8> download(const void *from, u64 len) {
    std::vector<u8> bytes(len);
    MUST(cudaMemcpy(bytes.data(), from, len, cudaMemcpyDeviceToHost));
    return bytes;
}

static u32 crc_on_cpu(const u8 *bytes, u64 len) {
    static const std::vector<u32> of_byte = [] {
        std::vector<u32> of_byte(256);
        for (u32 byte = 0; byte < 256; byte++) {
            of_byte[byte] = byte;
            for (int bit = 0; bit < 8; bit++) {
                of_byte[byte] = of_byte[byte] >> 1 ^ ((of_byte[byte] & 1) ? 0xedb88320u : 0);
            }
        }
        return of_byte;
    }();
    u32 sum = ~0u;
    for (u64 i = 0; i < len; i++) {
        sum = sum >> 8 ^ of_byte[(sum ^ bytes[i]) & 255];
    }
    return ~sum;
}

// SplitMix64.
struct Random {
    using result_type = u64;
    u64 state = 1;
    static constexpr u64 min() {
        return 0;
    }
    static constexpr u64 max() {
        return ~0ull;
    }
    u64 operator()() {
        state += 0x9e3779b97f4a7c15;
        u64 mixed = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
        mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
        return mixed ^ mixed >> 31;
    }
};

int main(int argc, char **argv) {
    const std::string folder = argc > 1 ? argv[1] : "kernels/compiled";
    MUST(cudaSetDevice(0));
    MUST(cudaFree(nullptr));
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaDeviceProp properties;
    MUST(cudaGetDeviceProperties(&properties, 0));
    std::printf("%s\n", properties.name);
    const CUfunction by_warp = load(folder, "apply", "apply_by_warp");
    const CUfunction by_block = load(folder, "apply", "apply_by_block");
    const CUfunction crc_chunks = load(folder, "crc", "crc_chunks");
    const CUfunction crc_combine = load(folder, "crc", "crc_combine");
    const CUfunction diff = load(folder, "diff", "diff");
    const CUfunction select_count = load(folder, "select", "select_count");
    const CUfunction select_scan = load(folder, "select", "select_scan");
    const CUfunction select_emit = load(folder, "select", "select_emit");
    const CUfunction validate = load(folder, "validate", "validate");

    Random random;
    std::vector<u8> source_bytes(GIB), target_bytes(GIB);
    for (auto *bytes : {&source_bytes, &target_bytes}) {
        for (u64 i = 0; i < GIB; i += 8) {
            const u64 word = random();
            std::memcpy(&(*bytes)[i], &word, 8);
        }
    }
    u8 *source, *target, *bitmap;
    MUST(cudaMalloc(&source, GIB + 64));
    MUST(cudaMalloc(&target, GIB + 64));
    MUST(cudaMalloc(&bitmap, GIB / 8 + 64));
    const u64 s = u64(source), t = u64(target);
    const auto reset = [&] {
        MUST(cudaMemcpy(source, source_bytes.data(), GIB, cudaMemcpyHostToDevice));
        MUST(cudaMemcpy(target, target_bytes.data(), GIB, cudaMemcpyHostToDevice));
    };

    // Ceilings.
    reset();
    double time = seconds([&] { MUST(cudaMemcpyAsync(target, source, GIB, cudaMemcpyDeviceToDevice, stream)); });
    copy_ceiling = 2.0 * GIB / time;
    report("device copy, 1 GiB (ceiling)", 2.0 * GIB, time, 0);
    time = seconds([&] { read_only<<<132 * 16, 256, 0, stream>>>((const uint4 *)source, GIB / 16, (u32 *)bitmap); });
    read_ceiling = GIB / time;
    report("read only, 1 GiB (ceiling)", GIB, time, 0);

    // Dense.
    {
        const Table<PieceRow> piece({PieceRow{t, s, 0, GIB, PIECE_DENSE, 1, 0}});
        for (u64 part : {8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10}) {
            for (bool mapped : {false, true}) {
                const Table<PartRow> parts(cut(0, GIB, part), mapped);
                time = seconds([&] { launch(by_block, 256, 1, parts, piece.rows); });
                const std::string name = "dense merge, 1 GiB, parts of " + std::to_string(part >> 10) + " KiB" +
                                         (mapped ? ", mapped table" : "");
                report(name.c_str(), 2.0 * GIB, time, copy_ceiling);
            }
        }
        check("dense", download(target, GIB) == source_bytes);
        for (u64 shift : {1, 4}) {
            const Table<PieceRow> shifted({PieceRow{t, s + shift, 0, GIB - 16, PIECE_DENSE, 1, 0}});
            const Table<PartRow> parts(cut(0, GIB - 16, 32 << 10));
            time = seconds([&] { launch(by_block, 256, 1, parts, shifted.rows); });
            const std::string name = "dense merge, source " + std::to_string(shift) + " off, parts of 32 KiB";
            report(name.c_str(), 2.0 * GIB, time, copy_ceiling);
            check("shifted", std::memcmp(download(target, GIB).data(), &source_bytes[shift], GIB - 16) == 0);
        }
        const Table<PieceRow> pattern({PieceRow{t, 0x0102030405060708, 0x1112131415161718, GIB, PIECE_FILL, 1, 0}});
        const Table<PartRow> parts(cut(0, GIB, 32 << 10));
        time = seconds([&] { launch(by_block, 256, 1, parts, pattern.rows); });
        report("fill, 1 GiB, parts of 32 KiB", GIB, time, 0);
        const Table<PartRow> warps(cut(0, GIB, 4 << 10));
        time = seconds([&] { launch(by_warp, 128, 4, warps, piece.rows); });
        report("dense merge, 1 GiB, parts of 4 KiB, a warp each", 2.0 * GIB, time, copy_ceiling);
    }

    // Masked: 16-bit elements.
    const u64 elements = GIB / 2;
    for (int percent : {0, 1, 50, 100}) {
        std::vector<u8> bits(elements / 8);
        u64 vectors = 0, partial = 0;
        for (u64 byte = 0; byte < bits.size(); byte++) {
            for (int bit = 0; bit < 8; bit++) {
                bits[byte] |= u8(percent == 100 || (percent > 0 && random() % 100 < u64(percent))) << bit;
            }
            vectors += bits[byte] != 0;
            partial += bits[byte] != 0 && bits[byte] != 255;
        }
        MUST(cudaMemcpy(bitmap, bits.data(), bits.size(), cudaMemcpyHostToDevice));
        reset();
        const Table<PieceRow> piece({PieceRow{t, u64(bitmap), s, elements, PIECE_MASKED, 2, 0}});
        for (u64 part : {16 << 10, 64 << 10}) {
            const Table<PartRow> parts(cut(0, elements, part / 2));
            time = seconds([&] { launch(by_block, 256, 1, parts, piece.rows); });
            const std::string name = "masked, " + std::to_string(percent) + " % of 16-bit elements, parts of " +
                                     std::to_string(part >> 10) + " KiB";
            report(name.c_str(), bits.size() + 32.0 * vectors + 16.0 * partial, time, copy_ceiling);
        }
        const std::vector<u8> found = download(target, GIB);
        bool right = true;
        for (u64 element = 0; element < elements; element++) {
            const auto &from = (bits[element / 8] >> (element % 8) & 1) ? source_bytes : target_bytes;
            right &= found[2 * element] == from[2 * element] && found[2 * element + 1] == from[2 * element + 1];
        }
        check("masked", right);
    }

    // Sparse: 16-bit elements, 1 % of them.
    for (bool sorted : {true, false}) {
        std::vector<u32> indices;
        for (u64 element = random() % 100; element < elements; element += 1 + random() % 199) {
            indices.push_back(element);
        }
        if (!sorted) {
            std::shuffle(indices.begin(), indices.end(), random);
        }
        reset();
        u32 *list;
        MUST(cudaMalloc(&list, 4 * indices.size()));
        MUST(cudaMemcpy(list, indices.data(), 4 * indices.size(), cudaMemcpyHostToDevice));
        const Table<PieceRow> piece({PieceRow{t, u64(list), s, indices.size(), PIECE_SPARSE, 2, 0}});
        for (u64 part : {512, 2048, 8192}) {
            const Table<PartRow> parts(cut(0, indices.size(), part));
            time = seconds([&] { launch(by_block, 256, 1, parts, piece.rows); });
            const std::string name = std::string("sparse, 1 % of 16-bit elements, ") +
                                     (sorted ? "ascending, " : "shuffled, ") + std::to_string(part) + " a part";
            report(name.c_str(), (4 + 2 + 64.0) * indices.size(), time, copy_ceiling);
            std::printf("%-58s %9.1f million elements, %.2f G elements/s\n", "", indices.size() / 1e6,
                        indices.size() / time / 1e9);
        }
        const std::vector<u8> found = download(target, GIB);
        std::vector<u8> expected = target_bytes;
        for (u64 i = 0; i < indices.size(); i++) {
            std::memcpy(&expected[2ull * indices[i]], &source_bytes[2 * i], 2);
        }
        check("sparse", found == expected);
        // The same list, validated.
        u32 *verdict;
        MUST(cudaMalloc(&verdict, 4));
        MUST(cudaMemset(verdict, 0, 4));
        std::vector<IndexRow> rows;
        for (u64 first = 0; first < indices.size(); first += 8192) {
            rows.push_back({u64(list + first), u64(bitmap), u64(verdict), elements,
                            std::min<u64>(8192, indices.size() - first)});
        }
        const Table<IndexRow> table(rows);
        const auto prove = [&] {
            MUST(cudaMemsetAsync(bitmap, 0, elements / 8, stream));
            launch(validate, 256, 1, table);
        };
        time = seconds(prove);
        report("validate the same indices, zeroing of bits included", 4.0 * indices.size(), time, 0);
        check("validate", *(u32 *)download(verdict, 4).data() == 0);
        launch(validate, 256, 1, table);
        MUST(cudaStreamSynchronize(stream));
        check("validate twice", *(u32 *)download(verdict, 4).data() == TWICE);
    }

    // Gather: pages of 16 KiB in random order into one area.
    {
        reset();
        std::vector<u64> order(GIB / PAGE);
        for (u64 page = 0; page < order.size(); page++) {
            order[page] = page;
        }
        std::shuffle(order.begin(), order.end(), random);
        std::vector<PieceRow> rows;
        std::vector<PartRow> parts;
        for (u64 page = 0; page < order.size(); page++) {
            rows.push_back({t + page * PAGE, s + order[page] * PAGE, 0, PAGE, PIECE_DENSE, 1, 0});
            parts.push_back({u32(page), 1, 0, ~0ull});
        }
        for (bool mapped : {false, true}) {
            const Table<PieceRow> pieces(rows, mapped);
            const Table<PartRow> table(parts, mapped);
            time = seconds([&] { launch(by_block, 256, 1, table, pieces.rows); });
            report(mapped ? "gather of 65,536 pieces of 16 KiB, mapped table" : "gather of 65,536 pieces of 16 KiB",
                   2.0 * GIB, time, copy_ceiling);
            time = seconds([&] { launch(by_warp, 128, 4, table, pieces.rows); });
            report(mapped ? "the same, a warp a piece, mapped table" : "the same, a warp a piece", 2.0 * GIB, time,
                   copy_ceiling);
        }
        const std::vector<u8> found = download(target, GIB);
        bool right = true;
        for (u64 page = 0; page < order.size(); page++) {
            right &= std::memcmp(&found[page * PAGE], &source_bytes[order[page] * PAGE], PAGE) == 0;
        }
        check("gather", right);
    }

    // The same in pieces of 4 KiB and 32 KiB, to find where a block becomes faster.
    for (u64 len : {4 << 10, 8 << 10, 32 << 10}) {
        std::vector<PieceRow> rows;
        std::vector<PartRow> parts;
        for (u64 begin = 0; begin < GIB; begin += len) {
            parts.push_back({u32(rows.size()), 1, 0, ~0ull});
            rows.push_back({t + begin, s + (begin * 77773 & (GIB - 1)), 0, len, PIECE_DENSE, 1, 0});
        }
        const Table<PieceRow> pieces(rows, true);
        const Table<PartRow> table(parts, true);
        const std::string name = "gather of pieces of " + std::to_string(len >> 10) + " KiB, mapped table";
        time = seconds([&] { launch(by_block, 256, 1, table, pieces.rows); });
        report((name + ", a block each").c_str(), 2.0 * GIB, time, copy_ceiling);
        time = seconds([&] { launch(by_warp, 128, 4, table, pieces.rows); });
        report((name + ", a warp each").c_str(), 2.0 * GIB, time, copy_ceiling);
    }
    for (u64 len : {1 << 10, 4 << 10, 16 << 10, 32 << 10}) {
        const Table<PieceRow> piece({PieceRow{t, s, 0, len, PIECE_DENSE, 1, 0}});
        const Table<PartRow> part({PartRow{0, 1, 0, ~0ull}});
        const double warp = seconds([&] { launch(by_warp, 128, 4, part, piece.rows); });
        const double block = seconds([&] { launch(by_block, 256, 1, part, piece.rows); });
        std::printf("one copy of %llu KiB: by a warp %.1f us, by a block %.1f us\n", len >> 10, warp * 1e6, block * 1e6);
    }

    // Checksums.
    for (u64 len : {4 << 10, 8 << 10, 16 << 10, 64 << 10}) {
        u32 *sums;
        MUST(cudaMalloc(&sums, 4 * (GIB / len)));
        std::vector<CrcRow> rows;
        for (u64 page = 0; page < GIB / len; page++) {
            rows.push_back({s + page * len, u64(sums + page), u32(len), CRC_FIRST | CRC_LAST});
        }
        for (bool mapped : {false, true}) {
            const Table<CrcRow> table(rows, mapped);
            time = seconds([&] { launch(crc_chunks, 128, 8, table); });
            const std::string name =
                "CRC-32 of 1 GiB, " + std::to_string(len >> 10) + " KiB a page" + (mapped ? ", mapped table" : "");
            report(name.c_str(), GIB, time, read_ceiling);
        }
        const std::vector<u8> found = download(sums, 4 * (GIB / len));
        for (u64 page = 0; page < GIB / len; page += GIB / len / 64 + 1) {
            check("crc", ((const u32 *)found.data())[page] == crc_on_cpu(&source_bytes[page * len], len));
        }
    }
    for (u64 len : {2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10}) {
        u32 *sum;
        MUST(cudaMalloc(&sum, 4));
        const Table<CrcRow> table({CrcRow{s, u64(sum), u32(len), CRC_FIRST | CRC_LAST}});
        time = seconds([&] { launch(crc_chunks, 128, 8, table); });
        std::printf("CRC-32 of one chunk of %llu KiB: %.1f us\n", len >> 10, time * 1e6);
    }
    for (u64 len : {64ull << 10, 2ull << 20, GIB}) {
        // One page without its first three bytes.
        const u64 chunks = len / CRC_CHUNK_LEN;
        u32 *sums;
        MUST(cudaMalloc(&sums, 4 * (chunks + 1)));
        std::vector<CrcRow> rows;
        for (u64 chunk = 0; chunk < chunks; chunk++) {
            const u64 begin = chunk == 0 ? 3 : chunk * CRC_CHUNK_LEN;
            rows.push_back({s + begin, u64(sums + chunk), u32((chunk + 1) * CRC_CHUNK_LEN - begin),
                            chunk == 0           ? CRC_FIRST
                            : chunk == chunks - 1 ? CRC_LAST
                                                  : 0});
        }
        const Table<CrcRow> table(rows);
        const Table<CombineRow> combine({CombineRow{u64(sums), u64(sums + chunks), u32(chunks), 0}});
        time = seconds([&] {
            launch(crc_chunks, 128, 8, table);
            launch(crc_combine, 256, 1, combine);
        });
        report(("CRC-32 of one page of " + std::to_string(len >> 10) + " KiB").c_str(), len, time, read_ceiling);
        const u32 found = *(u32 *)download(sums + chunks, 4).data();
        check("crc of chunks", found == crc_on_cpu(&source_bytes[3], len - 3));
    }

    // Diff: 1 % of 16-bit elements changed.
    {
        std::vector<u8> changed = source_bytes;
        for (u64 element = 0; element < elements; element++) {
            if (random() % 100 == 0) {
                changed[2 * element] ^= 1;
            }
        }
        MUST(cudaMemcpy(target, changed.data(), GIB, cudaMemcpyHostToDevice));
        for (u64 len : {16 << 10, 32 << 10, 64 << 10}) {
            std::vector<DiffRow> rows;
            for (u64 begin = 0; begin < GIB; begin += len) {
                rows.push_back({s + begin, t + begin, u64(bitmap) + begin / 16, u32(len), 2});
            }
            for (bool mapped : {false, true}) {
                const Table<DiffRow> table(rows, mapped);
                time = seconds([&] { launch(diff, 256, 1, table); });
                const std::string name = "diff, 1 GiB with 1 GiB, 1 %, rows of " + std::to_string(len >> 10) + " KiB" +
                                         (mapped ? ", mapped table" : "");
                report(name.c_str(), 2.0 * GIB, time, read_ceiling);
            }
        }
        const std::vector<u8> found = download(bitmap, elements / 8);
        // The bitmap written directly to host memory.
        {
            u8 *host;
            MUST(cudaHostAlloc(&host, elements / 8, cudaHostAllocMapped));
            std::vector<DiffRow> rows;
            for (u64 begin = 0; begin < GIB; begin += 64 << 10) {
                rows.push_back({s + begin, t + begin, u64(host) + begin / 16, 64 << 10, 2});
            }
            const Table<DiffRow> table(rows);
            time = seconds([&] { launch(diff, 256, 1, table); });
            report("diff, the bitmap into mapped memory", 2.0 * GIB, time, read_ceiling);
            check("diff into mapped memory", std::memcmp(host, found.data(), elements / 8) == 0);
        }
        bool right = true;
        for (u64 element = 0; element < elements; element++) {
            right &= (found[element / 8] >> (element % 8) & 1) == (changed[2 * element] != source_bytes[2 * element]);
        }
        check("diff", right);
        // The indices of changed elements, from the bitmap.
        std::vector<u32> expected;
        for (u64 element = 0; element < elements; element++) {
            if (found[element / 8] >> (element % 8) & 1) {
                expected.push_back(u32(element));
            }
        }
        constexpr u32 ROW_LEN = 8 << 10;
        const u32 count = u32(elements / 8 / ROW_LEN);
        u32 *indices, *numbers;
        MUST(cudaMalloc(&indices, 4 * expected.size()));
        MUST(cudaMalloc(&numbers, 4 * (count + 1)));
        std::vector<SelectRow> rows;
        for (u32 row = 0; row < count; row++) {
            rows.push_back({u64(bitmap) + u64(row) * ROW_LEN, u64(indices), u64(numbers + row), ROW_LEN,
                            8 * ROW_LEN * row, u32(expected.size()), 0});
        }
        const Table<SelectRow> table(rows, true);
        const Table<ScanRow> scan({{u64(numbers), u64(numbers + count), count, 0}}, true);
        time = seconds([&] {
            launch(select_count, 256, 1, table);
            launch(select_scan, 256, 1, scan);
            launch(select_emit, 256, 1, table);
        });
        report("indices of 1 % of 512 Mi elements", elements / 4.0 + 4.0 * expected.size(), time, read_ceiling);
        check("number of indices", *(u32 *)download(numbers + count, 4).data() == expected.size());
        check("indices", std::memcmp(download(indices, 4 * expected.size()).data(), expected.data(),
                                     4 * expected.size()) == 0);
    }

    // Many small deltas, all in mapped memory: 10,000 of 256 bytes to as many pages.
    {
        constexpr u32 COUNT = 10000, BYTES = 256;
        u8 *payload;
        MUST(cudaHostAlloc(&payload, COUNT * BYTES, cudaHostAllocMapped));
        std::memcpy(payload, source_bytes.data(), COUNT * BYTES);
        std::vector<PieceRow> rows;
        std::vector<PartRow> parts;
        for (u32 i = 0; i < COUNT; i++) {
            rows.push_back({t + i * PAGE + 512, u64(payload) + i * BYTES, 0, BYTES, PIECE_DENSE, 1, 0});
            parts.push_back({i, 1, 0, ~0ull});
        }
        for (bool mapped : {true, false}) {
            const Table<PieceRow> pieces(rows, mapped);
            const Table<PartRow> table(parts, mapped);
            for (bool warp : {true, false}) {
                const auto go = [&] {
                    if (warp) {
                        launch(by_warp, 128, 4, table, pieces.rows);
                    } else {
                        launch(by_block, 256, 1, table, pieces.rows);
                    }
                };
                time = seconds(go);
                std::vector<double> walls;
                for (int i = 0; i < 50; i++) {
                    const auto begin = std::chrono::steady_clock::now();
                    go();
                    MUST(cudaStreamSynchronize(stream));
                    walls.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
                }
                std::sort(walls.begin(), walls.end());
                std::printf("10,000 deltas of 256 B, payload mapped, table %-9s %s: GPU %6.1f us, launch to done %6.1f us "
                            "(p90 %6.1f)\n",
                            mapped ? "mapped," : "on device,", warp ? "a warp each " : "a block each", time * 1e6,
                            walls[25] * 1e6, walls[45] * 1e6);
            }
        }
        bool right = true;
        const std::vector<u8> found = download(target, COUNT * PAGE);
        for (u32 i = 0; i < COUNT; i++) {
            right &= std::memcmp(&found[i * PAGE + 512], payload + i * BYTES, BYTES) == 0;
        }
        check("small deltas", right);
        const Table<PieceRow> one_piece({rows[0]}, true);
        const Table<PartRow> one({parts[0]}, true);
        time = seconds([&] { launch(by_warp, 128, 4, one, one_piece.rows); });
        std::printf("one delta of 256 B: GPU %.1f us between events\n", time * 1e6);
    }

    std::printf(all_right ? "all results are those of the CPU\n" : "WRONG RESULTS\n");
    return all_right ? 0 : 1;
}
