// Attention within long segments for NVIDIA Hopper (sm_90a): without windows and biases, in float16 or bfloat16.
//
// One persistent program per multiprocessor takes tiles of the schedule in turn. One warp copies blocks of queries, keys
// and values to shared memory (TMA); GROUPS warpgroups of 128 threads own 64 query rows each. A warpgroup starts the
// scores of the next block of keys before the product of the last block's weights and values, so that its softmax runs
// beside the latter, and the warpgroups take turns, so that one's softmax runs beside the products of another. The
// scheme of FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608).
//
// Defined by the compilation (see config.py): HEAD_DIM, AHEAD, KEYS, GROUPS, STAGES, SWIZZLE, BFLOAT16,
// CONSUMER_REGISTERS, PRODUCER_REGISTERS. The functions wgmma_scores and wgmma_values are generated before this file (see
// wgmma.py).

using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr int QUERIES = 64;               // rows of a warpgroup, fixed by the instruction
constexpr int COLUMNS = SWIZZLE / 2;      // channels of a chunk: a matrix [rows, COLUMNS] in shared memory
constexpr int WIDTH = HEAD_DIM + AHEAD;   // channels that are loaded: see first_channel
constexpr int CHUNKS = (WIDTH + COLUMNS - 1) / COLUMNS;
constexpr int STEPS = (WIDTH + 15) / 16;  // products of 16 channels that make the scores
constexpr int Q_BYTES = CHUNKS * QUERIES * SWIZZLE;
constexpr int K_BYTES = CHUNKS * KEYS * SWIZZLE;
constexpr int THREADS = 128;              // of a warpgroup
constexpr int TILE_ROWS = QUERIES * GROUPS;
#define MINUS_INFINITY __int_as_float(0xff800000)
#define FLOAT_MAX __int_as_float(0x7f7fffff)
constexpr int LOWEST = -2147483647 - 1;

static_assert(KEYS % 16 == 0 && KEYS <= 256 && HEAD_DIM % 8 == 0);

struct alignas(64) TensorMap {
    char bytes[128];
};

struct Barriers {
    uint64 q_full[GROUPS], q_empty[GROUPS], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// --- Barriers in shared memory ---

__device__ uint32 shared_address(const void* pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

__device__ void barrier_init(uint64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

__device__ void arrive(uint64& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ void arrive_and_expect(uint64& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

__device__ void wait(uint64& barrier, uint32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready:\n"
        "}\n" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

// Named barriers of the block. Barrier 0 is __syncthreads.
__device__ void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ void arrive_threads(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Position in a ring of STAGES blocks.
struct Stage {
    int index = 0;
    uint32 parity = 0;

    __device__ void next() {
        if (++index == STAGES) {
            index = 0;
            parity ^= 1;
        }
    }
};

// --- Copies and products ---

// Heads of 72 channels lie 144 bytes apart, so every odd one begins in the middle of a memory sector, which slows copies
// down. With AHEAD = 8, keys and values are pairs of heads, and a head is loaded with 8 channels of its neighbour, at its
// beginning if it is odd, where the queries are 0 and the output is not written.
__device__ int first_channel(int key_head) { return AHEAD ? key_head % 2 * AHEAD : 0; }

// Copy ROWS rows of one head, from `row` on, as CHUNKS matrices. Rows and channels that do not exist become 0.
template <int ROWS>
__device__ void copy(char* to, const TensorMap& map, uint64& barrier, int channel, int head, int row) {
    arrive_and_expect(barrier, CHUNKS * ROWS * SWIZZLE);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
            ::"r"(shared_address(to + chunk * ROWS * SWIZZLE)), "l"(&map), "r"(channel + chunk * COLUMNS), "r"(head), "r"(row),
            "r"(shared_address(&barrier))
            : "memory");
    }
}

// Descriptor of a matrix in shared memory (PTX ISA, "Matrix descriptor format"): address and strides in units of 16
// bytes. `outer`: bytes from chunk to chunk; used where channels are the rows of the product.
__device__ uint64 descriptor(const char* matrix, int outer) {
    constexpr uint64 MODE = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
    constexpr uint64 EIGHT_ROWS = 8 * SWIZZLE / 16;
    return MODE << 62 | EIGHT_ROWS << 32 | (uint64)(outer / 16) << 16 | (shared_address(matrix) & 0x3FFFF) >> 4;
}

// Registers that a running product uses must not be moved: the compiler sees them change here.
template <int N>
__device__ void hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ void start_scores(float (&scores)[KEYS / 2], uint64 q, uint64 k) {
    hold(scores);
    begin_products();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        constexpr int A_CHUNK = COLUMNS / 16;  // steps
        const int chunk = step / A_CHUNK, bytes = step % A_CHUNK * 32;
        wgmma_scores(scores, q + (chunk * QUERIES * SWIZZLE + bytes) / 16, k + (chunk * KEYS * SWIZZLE + bytes) / 16,
                     step > 0);
    }
    commit_products();
}

__device__ void start_values(float (&out)[WIDTH / 2], uint32 (&weights)[KEYS / 4], uint64 v) {
    hold(out);
    begin_products();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        wgmma_values(out, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3],
                     v + step * 16 * SWIZZLE / 16);
    }
    commit_products();
}

// --- Softmax: a thread holds columns 8 i + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8 of its warp ---

__device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ float sum_of_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ uint32 packed(float low, float high) {
    uint32 both;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// Exponents are relative to a bound of each row, and what was summed is rescaled when the bound grows. It does so, to the
// largest score so far, only where a score exceeds it by more than this power of two: weights of up to 2^8 are as exact
// as those of up to 1, and most blocks need no rescaling.
constexpr float GROWTH = 8;

struct Softmax {
    float bound[2] = {MINUS_INFINITY, MINUS_INFINITY};
    float shift[2] = {0, 0};              // bounds as powers of two
    int limit[2] = {LOWEST, LOWEST};      // scores whose bits are at least this may be too large
    float total[2] = {0, 0};              // over the columns of this thread
    float decay[2];                       // of what was summed before the last block of keys, if bounds grew
    bool grew;                            // of any row of the warp

    // Replace scores by weights.
    __device__ void add(float (&scores)[KEYS / 2], float scale) {
        // As integers, of which one instruction takes the largest of three, floats from 0 on are in their order, and all
        // negative ones are below them. A row with a negative limit asks in every block, and so does one with a NaN.
        int most[2] = {LOWEST, LOWEST};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2) {
            int& largest = most[i / 2 % 2];
            largest = __vimax3_s32(largest, __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
        }
        grew = __any_sync(~0u, most[0] >= limit[0] || most[1] >= limit[1]);
        if (grew) grow(scores, scale);
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            scores[i] = power_of_two(fmaf(scores[i], scale, -shift[i / 2 % 2]));
            sum[i / 2 % 2] += scores[i];
        }
        total[0] += sum[0];
        total[1] += sum[1];
    }

    // Each row decides by its own scores, whatever other rows need: its bits depend on nothing else.
    __device__ void grow(const float (&scores)[KEYS / 2], float scale) {
        const float growth = fminf(GROWTH / scale, FLOAT_MAX);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float most = MINUS_INFINITY;
#pragma unroll
            for (int i = 2 * row; i < KEYS / 2; i += 4) most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
            most = largest_of_row(most);
            if (!(most > __fadd_rd(bound[row], growth))) most = bound[row];
            const float finite = most == MINUS_INFINITY ? 0 : most;  // no key so far counts
            decay[row] = power_of_two((bound[row] - finite) * scale);
            total[row] *= decay[row];
            bound[row] = most;
            shift[row] = finite * scale;
            const float highest = __fadd_rd(most, growth);  // rounded up, weights could overflow in float16
            limit[row] = highest >= 0 ? __float_as_int(highest) + 1 : LOWEST;
        }
    }

    __device__ void rescale(float (&out)[WIDTH / 2]) const {
        if (!grew) return;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) out[i] *= decay[i / 2 % 2];
    }
};

__device__ void mask_from(float (&scores)[KEYS / 2], int keys) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        if (8 * (i / 4) + column + i % 2 >= keys) scores[i] = MINUS_INFINITY;
    }
}

__device__ void pack(uint32 (&weights)[KEYS / 4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i] = packed(scores[2 * i], scores[2 * i + 1]);
}

// --- Tiles ---

struct Tile {
    int q_start, q_end, k_start, k_end, head;

    __device__ Tile(const int* tiles, int work, int heads, int key_rows) {
        const int* entry = tiles + 5 + work / heads * 5;
        q_end = entry[1];
        k_start = entry[2];
        k_end = min(entry[3], key_rows);  // whatever the boundaries are: too many blocks would never end
        const int index = work - entry[4] * heads, full = (q_end - entry[0]) / TILE_ROWS;
        const bool is_full = index < full * heads;  // those of all heads come before the short ones, which take less
        head = is_full ? index / full : index - full * heads;
        q_start = entry[0] + (is_full ? index % full : full) * TILE_ROWS;
    }

    __device__ int blocks() const { return max(1, (k_end - k_start + KEYS - 1) / KEYS); }  // of keys
};

// Programs take whole tiles in turn, as long as there is one for each of them. Most tiles take no longer than those before
// them, so each round goes back the way that the last one came. The tiles that are left over would keep a few programs
// busy while the others are done. Where there are programs enough, they are taken in parts: each warpgroup's rows by
// another program, or those of two and of one out of three. A row has the same bits wherever it is computed.
struct Shares {
    int whole, groups, parts, end;  // tiles taken whole, warpgroups and parts of each of the others, and pieces of work

    __device__ void init(const int* tiles, int heads) {
        const int count = tiles[1] * heads, programs = gridDim.x, rest = count % programs;
        const int* last = tiles + tiles[1] * 5;
        const int short_rows = tiles[1] > 0 ? (last[1] - last[0]) % TILE_ROWS : 0;
        // So few are the short tiles of the last segment alone.
        groups = short_rows > 0 && rest <= heads ? (short_rows + QUERIES - 1) / QUERIES : GROUPS;
        parts = rest * groups <= programs ? groups : groups > 2 && rest * 2 <= programs ? 2 : 1;
        whole = count - rest;
        end = whole + rest * parts;
    }

    // The work of this program in a round, from `end` on if there is none.
    __device__ int work(int round) const {
        const int forth = round % 2 == 0;
        return round * gridDim.x + (forth ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    }

    __device__ int tile(int work) const { return work < whole ? work : whole + (work - whole) / parts; }

    __device__ bool takes(int group, int work) const {
        return work < whole || (work - whole) % parts == group * parts / groups;
    }
};

__device__ void write(unsigned short* to, int heads, const Tile& tile, int group, int first, const float (&out)[WIDTH / 2],
                      const float (&norm)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = tile.q_start + group * QUERIES + warp * 16 + half * 8 + lane / 4;
        if (row >= tile.q_end) continue;
        unsigned short* at = to + ((long long)row * heads + tile.head) * HEAD_DIM - first + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < WIDTH / 8; ++i) {
            if (AHEAD && (8 * i < first || 8 * i >= first + HEAD_DIM)) continue;
            *(uint32*)(at + 8 * i) =
                packed(out[4 * i + 2 * half] * norm[half], out[4 * i + 2 * half + 1] * norm[half]);
        }
    }
}

// --- Producer ---

__device__ void produce(Barriers& barriers, const Shares& shares, char* q_blocks, char* k_blocks, char* v_blocks,
                        const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const int* tiles,
                        int heads, int per_key_head, int key_rows) {
    Stage k_stage, v_stage;
    uint32 q_parity = 1;  // of a barrier whose buffer was never used: passes
    k_stage.parity = v_stage.parity = 1;
    for (int round = 0, work; (work = shares.work(round)) < shares.end; ++round) {
        const Tile tile(tiles, shares.tile(work), heads, key_rows);
        const int blocks = tile.blocks(), key_head = tile.head / per_key_head;
        const int channel = AHEAD ? key_head % 2 * (HEAD_DIM - AHEAD) : 0, head = AHEAD ? key_head / 2 : key_head;
        for (int group = 0; group < GROUPS; ++group) {
            wait(barriers.q_empty[group], q_parity);
            copy<QUERIES>(q_blocks + group * Q_BYTES, q_map, barriers.q_full[group],
                          -first_channel(key_head), tile.head, tile.q_start + group * QUERIES);
        }
        q_parity ^= 1;
        for (int block = blocks; block >= 0; --block) {  // the keys of a block one step before its values
            if (block > 0) {
                wait(barriers.k_empty[k_stage.index], k_stage.parity);
                copy<KEYS>(k_blocks + k_stage.index * K_BYTES, k_map, barriers.k_full[k_stage.index], channel, head,
                           tile.k_start + (block - 1) * KEYS);
                k_stage.next();
            }
            if (block < blocks) {
                wait(barriers.v_empty[v_stage.index], v_stage.parity);
                copy<KEYS>(v_blocks + v_stage.index * K_BYTES, v_map, barriers.v_full[v_stage.index], channel, head,
                           tile.k_start + block * KEYS);
                v_stage.next();
            }
        }
    }
}

// --- Consumers ---

// Rows past the end of the segment belong to others or are padding, where 0 * NaN would be NaN. Each warpgroup writes all
// zeros itself, possibly over the same zeros that another warpgroup reads.
__device__ void zero_from(char* values, int keys, int group) {
    const int bytes = (KEYS - keys) * SWIZZLE;
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        char* rows = values + (chunk * KEYS + keys) * SWIZZLE;
        for (int at = threadIdx.x % THREADS * 16; at < bytes; at += THREADS * 16) {
            *(uint4*)(rows + at) = make_uint4(0, 0, 0, 0);
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync_threads(1 + GROUPS + group, THREADS);
}

// Leave the keys and values of a tile, and the turns, to the warpgroups that have rows of it.
__device__ void pass(Barriers& barriers, Stage& k_stage, Stage& v_stage, int blocks, int group) {
    const bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        sync_threads(1 + group, 2 * THREADS);
        arrive_threads(1 + (group + 1) % GROUPS, 2 * THREADS);
        wait(barriers.k_full[k_stage.index], k_stage.parity);
        if (first_lane) arrive(barriers.k_empty[k_stage.index]);
        k_stage.next();
        wait(barriers.v_full[v_stage.index], v_stage.parity);
        if (first_lane) arrive(barriers.v_empty[v_stage.index]);
        v_stage.next();
    }
}

__device__ void consume(Barriers& barriers, const Shares& shares, char* q_blocks, char* k_blocks, char* v_blocks,
                        const int* tiles, int heads, int per_key_head, int key_rows, float scale, unsigned short* to) {
    const int group = __shfl_sync(~0u, threadIdx.x / THREADS, 0) - 1;  // so that the compiler knows: one for a warp
    const int next_turn = 1 + (group + 1) % GROUPS;
    const bool first_lane = threadIdx.x % 32 == 0;
    const uint64 q = descriptor(q_blocks + group * Q_BYTES, 0);
    const uint64 k = descriptor(k_blocks, 0), v = descriptor(v_blocks, KEYS * SWIZZLE);
    Stage k_stage, v_stage;
    uint32 q_parity = 0;
    if (group == GROUPS - 1) arrive_threads(1, 2 * THREADS);  // the first turn is group 0's
    for (int round = 0, work; (work = shares.work(round)) < shares.end; ++round) {
        const Tile tile(tiles, shares.tile(work), heads, key_rows);
        const int blocks = tile.blocks(), first = first_channel(tile.head / per_key_head);
        if (!shares.takes(group, work) || tile.q_start + group * QUERIES >= tile.q_end) {
            wait(barriers.q_full[group], q_parity);
            if (first_lane) arrive(barriers.q_empty[group]);
            q_parity ^= 1;
            pass(barriers, k_stage, v_stage, blocks, group);
            continue;
        }
        float out[WIDTH / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) out[i] = 0;
        float scores[KEYS / 2];
        uint32 weights[KEYS / 4];
        Softmax softmax;

        // The last block comes first: it alone may be partial.
        const int keys = max(0, tile.k_end - tile.k_start - (blocks - 1) * KEYS);
        wait(barriers.q_full[group], q_parity);
        wait(barriers.k_full[k_stage.index], k_stage.parity);
        sync_threads(1 + group, 2 * THREADS);
        start_scores(scores, q, k + k_stage.index * K_BYTES / 16);
        arrive_threads(next_turn, 2 * THREADS);
        wait_products<0>();
        hold(scores);
        if (first_lane) arrive(barriers.k_empty[k_stage.index]);
        k_stage.next();
        if (keys < KEYS) mask_from(scores, keys);
        softmax.add(scores, scale);
        pack(weights, scores);
        if (keys < KEYS) {
            wait(barriers.v_full[v_stage.index], v_stage.parity);
            zero_from(v_blocks + v_stage.index * K_BYTES, keys, group);
        }

        for (int block = blocks - 1; block > 0; --block) {
            wait(barriers.k_full[k_stage.index], k_stage.parity);
            sync_threads(1 + group, 2 * THREADS);
            start_scores(scores, q, k + k_stage.index * K_BYTES / 16);
            softmax.rescale(out);  // beside the product of the scores: nothing delays its start
            wait(barriers.v_full[v_stage.index], v_stage.parity);
            start_values(out, weights, v + v_stage.index * K_BYTES / 16);
            arrive_threads(next_turn, 2 * THREADS);
            wait_products<1>();
            hold(scores);
            if (first_lane) arrive(barriers.k_empty[k_stage.index]);
            k_stage.next();
            softmax.add(scores, scale);
            wait_products<0>();
            hold(out);
            if (first_lane) arrive(barriers.v_empty[v_stage.index]);
            v_stage.next();
            pack(weights, scores);
        }
        if (first_lane) arrive(barriers.q_empty[group]);
        q_parity ^= 1;
        softmax.rescale(out);
        wait(barriers.v_full[v_stage.index], v_stage.parity);
        start_values(out, weights, v + v_stage.index * K_BYTES / 16);
        const float norm[2] = {1 / sum_of_row(softmax.total[0]), 1 / sum_of_row(softmax.total[1])};
        wait_products<0>();
        hold(out);
        if (first_lane) arrive(barriers.v_empty[v_stage.index]);
        v_stage.next();
        write(to, heads, tile, group, first, out, norm);
    }
}

extern "C" __global__ void __launch_bounds__((GROUPS + 1) * THREADS, 1)
    attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, unsigned short* out, const int* tiles,
              int heads, int per_key_head, int key_rows, float scale) {
    extern __shared__ char memory[];
    char* q_blocks = (char*)(((uint64)memory + 1023) / 1024 * 1024);
    char* k_blocks = q_blocks + GROUPS * Q_BYTES;
    char* v_blocks = k_blocks + STAGES * K_BYTES;
    __shared__ Barriers barriers;
    __shared__ Shares shares;  // registers are scarce
    if (threadIdx.x == 0) {
        shares.init(tiles, heads);
        for (int group = 0; group < GROUPS; ++group) {
            barrier_init(barriers.q_full[group], 1);
            barrier_init(barriers.q_empty[group], 4);  // warps
        }
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(barriers.k_full[stage], 1);
            barrier_init(barriers.v_full[stage], 1);
            barrier_init(barriers.k_empty[stage], 4 * GROUPS);
            barrier_init(barriers.v_empty[stage], 4 * GROUPS);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) {
            produce(barriers, shares, q_blocks, k_blocks, v_blocks, q_map, k_map, v_map, tiles, heads, per_key_head,
                    key_rows);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(barriers, shares, q_blocks, k_blocks, v_blocks, tiles, heads, per_key_head, key_rows, scale, out);
    }
}
