// The clocked recurrence and its adjoint on CUDA devices, compiled at run time for the sizes of a layer (ops/cuda.py).
//
// The algorithm is that of cpu.cpp, where it is written out: suffix sums z_j are kept while module j is, so a step
// multiplies only the weights of the modules that fire. A block takes one sequence through time. All are on their way at
// once, so what counts is how long a step takes: its chain of dependent instructions, not its arithmetic. A step is two
// phases with a barrier after each, forward
//
//     rows      z_j = z_{j+1} + U_j m_j, one row a thread;  the same thread goes on to  h = tanh(Wxh x + z_0)
//     sums      m_k = z_k + Whm[k] h, the sum over h shared by LANES threads
//
// and backward, in reverse time,
//
//     rows      gh = sum_k Whm[k]^T gm_k, one row a thread;  ga = gh (1 - h^2);  gz_{j+1} += gz_j
//     sums      gm_j = gm_j + U_j^T gz_j, shared by LANES threads
//
// COMPUTE threads do that and nothing else. CARRIERS warps beside them carry: inputs to shared memory, AHEAD steps early, and
// results to device memory, each of them little enough to be done before the others. Weights of the fastest modules
// (RESIDENT) stay in shared memory, those of module 0 in registers (CACHED), and so do z_0 and z_1. Steps at which one
// to four modules fire, 15 of 16, have code of their own.
//
// Weight gradients are sums of outer products over the steps at which a module fired. The backward pass leaves the left
// factors behind (records), `products` adds up chunks of them on all processors, `gather` adds up the chunks, in order:
// nothing depends on which thread came first.
//
// Small networks (SMALL) have kernels of their own for both passes, in small.cu, which follows this text.
//
// The constants H (0: the Clockwork RNN), M, g, I, the types real and value, and the choices in capitals are defined
// by ops/cuda.py in front of this text. Modules are numbered from 0.

typedef long long int64;
struct alignas(16) Block16 { unsigned words[4]; };

#ifndef MSLMN_EMULATED  // the tests run this file on the CPU, with these few names for threads in turn

#define INLINE __device__ __forceinline__
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#define UNROLL _Pragma("unroll")
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(n) PRAGMA(unroll n)
#define CONSTANT __constant__ const

INLINE int thread() { return threadIdx.x; }
INLINE int block() { return blockIdx.x; }
INLINE int column() { return blockIdx.y; }
INLINE void barrier(int threads) {
    if (threads > 32) __syncthreads(); else __syncwarp();
}
INLINE char* shared_memory() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}
INLINE float shuffle(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
INLINE double shuffle(double v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
INLINE int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }  // the same in all threads of a warp
INLINE int opaque(int v) {  // what the compiler cannot derive anew at each step, and so keeps
    asm volatile("" : "+r"(v));
    return v;
}
template <class T> INLINE T* opaque(T* p) {  // in device memory
    asm volatile("" : "+l"(p));
    __builtin_assume(__isGlobal(p));
    return p;
}
template <class T> INLINE T* advanced(T* p, int n, int pitch) {  // p + n * pitch, also in device memory, in one instruction
    T* to;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(n), "r"(pitch * static_cast<int>(sizeof(T))), "l"(p));
    __builtin_assume(__isGlobal(to));
    return to;
}
INLINE int zeros_at_the_end(int64 t) { return __ffsll(t) - 1; }  // -1 of 0
INLINE void copy_async(unsigned* to, const unsigned* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}
INLINE void copy_async(Block16* to, const Block16* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending> INLINE void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
INLINE float widen(float16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
    return f;
}
INLINE float widen(bfloat16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }
INLINE void put(float16* to, float v) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(v)); }
INLINE void put(bfloat16* to, float v) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(v)); }
INLINE float tanh_of(float v) { return tanhf(v); }
INLINE double tanh_of(double v) { return tanh(v); }

#endif

INLINE float widen(float v) { return v; }
INLINE double widen(double v) { return v; }
INLINE void put(float* to, float v) { *to = v; }
INLINE void put(double* to, double v) { *to = v; }

constexpr int THREADS = COMPUTE + 32 * CARRIERS;
constexpr int G = g * M;
constexpr int ALL = H + G;  // rows of U_{g-1}
constexpr bool CLOCKWORK = H == 0;
constexpr bool QUADS = H % 4 == 0 && M % 4 == 0;  // rows of results are whole quads

constexpr int up(int n, int to) { return (n + to - 1) / to * to; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int MP = up(M, 4), GP = g * MP;  // a module's memory, in whole quads
constexpr int n(int j) { return H + (j + 1) * M; }  // rows of U_j
constexpr int rows_before(int j) { return j * H + M * (j * (j + 1) / 2); }  // of U_0 .. U_{j-1}

struct alignas(16) Quad { real v[4]; };
INLINE const Quad* quads(const real* p) { return reinterpret_cast<const Quad*>(p); }
template <int n> struct Number { static constexpr int value = n; };
constexpr int SPECIAL = M <= 64 ? 4 : 2;         // steps at which more modules fire share their code
constexpr int AT_ONCE = M <= 64 ? (M + 3) / 4 : 8;  // quads of a module's memory: longer loops stay loops

// Parameters as torch holds them, null where there is none. The Clockwork RNN has g Wxh and b_h, in the place of Whm
// and b_m, and its Whh in the place of Wmm.
struct Weights {
    const real *Wxh, *b_h, *Wmh[g], *Whm[g], *Wmm[g], *b_m[g];
};
INLINE real sent(const Weights& w, int j, int row, int k) {  // U_j[row, k]
    return row < H ? w.Wmh[j][row * M + k] : w.Wmm[j][(row - H) * M + k];
}
INLINE real bias(const Weights& w, int row) {
    if (row < H) return w.b_h ? w.b_h[row] : real(0);
    const real* b = w.b_m[(row - H) / M];
    return b ? b[(row - H) % M] : real(0);
}

// Where a batch lies. Step t of a packed batch begins at row packing[t]; after its T + 1 offsets come the lengths of
// the B sequences, then how many steps all sequences before each have. Null: every sequence has T steps.
struct Batch {
    const int64 *packing, *clock;
    int T, B, reverse;

    INLINE int length(int b) const { return packing ? static_cast<int>(packing[T + 1 + b]) : T; }
    INLINE int64 before(int b) const { return packing ? packing[T + 1 + B + b] : static_cast<int64>(T) * b; }
    INLINE int64 record(int j, int b) const { return (before(b) >> j) + 2 * b; }  // the first of module j's
};

// clock.py, in CUDA: how many modules fire at step t = 1, 2, ..
INLINE int active(int64 t) {
    const int zeros = zeros_at_the_end(t);
    return zeros < 0 ? g : smaller(g, 1 + zeros);
}

// The sequence of a block.
struct Sequence {
    const Batch& batch;
    int b, length;
    int64 clock;

    INLINE Sequence(const Batch& batch) : batch(batch), b(block()), length(batch.length(b)), clock(batch.clock[b]) {}

    INLINE int fires(int s) const { return active(clock + s + 1); }
    // step(s, how many modules fire) for every step from the first to the last, or back. A number that the compiler knows
    // makes code of its own: for 1, at every other step, up to SPECIAL; Number<0>: it does not.
    template <class Step> INLINE void each_step(Step step, bool forward) const {
        const int low = static_cast<int>(clock) + 1;  // s + low = t, as far as the last bits go
        auto even = [&](int s) {
            const int t = low + s;
            if (g <= 2 || t & 2)
                step(s, Number<smaller(2, g)>{}, smaller(2, g));
            else if (SPECIAL >= 3 && (g == 3 || t & 4))
                step(s, Number<smaller(3, g)>{}, smaller(3, g));
            else if (SPECIAL >= 4 && (g == 4 || t & 8))
                step(s, Number<smaller(4, g)>{}, smaller(4, g));
            else
                step(s, Number<0>{}, fires(s));
        };
        if (forward) {
            for (int s = low & 1 ? 0 : -1; s < length; s += 2) {  // s is an odd step of the clock
                if (s >= 0) step(s, Number<1>{}, 1);
                if (s + 1 < length) even(s + 1);
            }
        } else {
            for (int s = (length - 1 + low) & 1 ? length - 1 : length; s >= -1; s -= 2) {
                if (s < length && s >= 0) step(s, Number<1>{}, 1);
                if (s - 1 >= 0) even(s - 1);
            }
        }
    }
    INLINE int64 row(int s) const {  // where its s-th step lies
        if (s < 0 || s >= length) return 0;
        const int t = batch.reverse ? length - 1 - s : s;
        return (batch.packing ? batch.packing[t] : static_cast<int64>(t) * batch.B) + b;
    }
};

// The rows of a sequence, step by step; the next one is looked up a step early.
struct Walk {
    const Sequence& of;
    int s, forward;
    int64 row, next;

    INLINE Walk(const Sequence& of, int s, int forward)
        : of(of), s(s), forward(forward), row(of.row(s)), next(of.row(s + forward)) {}
    INLINE void go_on() {
        s += forward, row = next;
        next = of.row(s + forward);
    }
};

// A row of values in device memory, on its way to shared memory, in blocks of 16 bytes, if it is made of them, or words of
// four. A row of 16-bit values may begin in the middle of a word: then a slot has a value too many in front.
constexpr int words(int values) { return up(values * static_cast<int>(sizeof(value)) + 2, 16) / 4; }

template <int values> INLINE void fetch(unsigned* slot, const value* row, int lane) {
    const size_t begin = reinterpret_cast<size_t>(row);
    if (values * sizeof(value) % 16 == 0 && begin % 16 == 0) {
        for (int i = lane; i < static_cast<int>(values * sizeof(value) / 16); i += 32)
            copy_async(reinterpret_cast<Block16*>(slot) + i, reinterpret_cast<const Block16*>(row) + i);
    } else {
        const unsigned* from = reinterpret_cast<const unsigned*>(begin & ~size_t(3));
        const int count = static_cast<int>((begin + values * sizeof(value) - (begin & ~size_t(3)) + 3) / 4);
        for (int i = lane; i < count; i += 32) copy_async(slot + i, from + i);
    }
}
INLINE int oddness(const value* row) {  // what `fetched` must skip
    return sizeof(value) == 2 ? static_cast<int>(reinterpret_cast<size_t>(row) & 2) / 2 : 0;
}
INLINE real fetched(const unsigned* slot, const int* odd, int i) {
    return widen(reinterpret_cast<const value*>(slot)[sizeof(value) == 2 ? i + *odd : i]);
}

// Values from shared memory, where from(i) points to them, to device memory: in quads where that is possible.
template <class To, class From> INLINE void carry(To* to, int values, From from, int lane) {
    if (QUADS) {
        struct alignas(4 * sizeof(To) < 16 ? 4 * sizeof(To) : 16) Four { To v[4]; };
        UNROLL_BY(4) for (int i = lane; i < values / 4; i += 32) {
            const Quad q = *quads(from(4 * i));
            Four four;
            UNROLL for (int k = 0; k < 4; k++) put(&four.v[k], q.v[k]);
            reinterpret_cast<Four*>(to)[i] = four;
        }
    } else {
        for (int i = lane; i < values; i += 32) put(to + i, *from(i));
    }
}

INLINE void add_product(real (&sums)[4], const Quad& a, const Quad& b) {
    UNROLL for (int i = 0; i < 4; i++) sums[i] += a.v[i] * b.v[i];
}
INLINE real total(const real (&sums)[4]) { return (sums[0] + sums[2]) + (sums[1] + sums[3]); }

// The packed weights of one pass, fastest module first, so that a prefix of them fits shared memory. Of each module: a
// matrix of threads' rows, with M columns, as quads [quad][row]; then one of M rows, that are summed by LANES threads,
// as quads [quad][row][lane].
#ifdef FORWARD
constexpr int OWNED_0 = H, OWNED_1 = M;                    // U_j
constexpr int SUMMED_0 = up(H, 4 * LANES), SUMMED_1 = 0;   // Whm[j]
#else
constexpr int OWNED_0 = H, OWNED_1 = 0;                                     // Whm[j]^T
constexpr int SUMMED_0 = up(H, 4 * LANES), SUMMED_1 = up(M, 4 * LANES);     // U_j^T
#endif
constexpr int owned(int j) { return OWNED_0 + OWNED_1 * (j + 1); }
constexpr int summed(int j) { return SUMMED_0 + SUMMED_1 * (j + 1); }
constexpr int summed_before(int j) { return SUMMED_0 * j + SUMMED_1 * (j * (j + 1) / 2); }
constexpr int module_at(int j) { return MP * (OWNED_0 * j + OWNED_1 * (j * (j + 1) / 2)) + M * summed_before(j); }
constexpr int PACKED = module_at(g);
INLINE int place(int row) {  // of a row of U_j in what is summed
    return row < H ? row : SUMMED_0 + (row - H) / M * SUMMED_1 + (row - H) % M;
}

INLINE real packed_value(const Weights& w, int j, int e) {
    if (e < owned(j) * MP) {
        const int quad = e / (4 * owned(j)), row = e / 4 - quad * owned(j), k = 4 * quad + e % 4;
        if (k >= M) return 0;
#ifdef FORWARD
        return sent(w, j, row, k);
#else
        return w.Whm[j][k * H + row];
#endif
    }
    e -= owned(j) * MP;
    const int lane = e / 4 % LANES, row = e / (4 * LANES) % M, quad = e / (4 * LANES * M);
    const int k = (quad * LANES + lane) * 4 + e % 4;
#ifdef FORWARD
    return k < H ? w.Whm[j][row * H + k] : real(0);
#else
    if (k < SUMMED_0) return k < H ? sent(w, j, k, row) : real(0);
    const int to = (k - SUMMED_0) / SUMMED_1, o = (k - SUMMED_0) % SUMMED_1;
    return o < M ? sent(w, j, H + to * M + o, row) : real(0);
#endif
}

struct Pack {
    Weights weights;
    real* packed;
};

KERNEL(256) pack(const Pack a) {
    const int e = block() * 256 + thread();
    if (e >= PACKED) return;
    int j = 0;
    while (e >= module_at(j + 1)) j++;
    a.packed[e] = packed_value(a.weights, j, e - module_at(j));
}

#ifndef SMALL

constexpr int OWN = (H + M + COMPUTE - 1) / COMPUTE;  // rows a thread always has, and maybe more
constexpr int HIDDEN = (H + COMPUTE - 1) / COMPUTE;   // values of h a thread has
constexpr int FIRST = COMPUTE / LANES;                // sums that all threads make at once
constexpr int PARTS = summed(smaller(g - 1, (FIRST - 1) / M)) / (4 * LANES);  // quads a thread has of one
INLINE int fastest_of(int row) { return row < H ? 0 : (row - H) / M; }  // the module whose turn a row of U_j is

// The weights of a pass as a block has them: those that a thread needs most in registers (CACHED), some modules in
// shared memory, others outside.
struct Held {
    const real *shared, *packed;
    Quad rows[CACHED ? OWN : 1][MP / 4];  // of module 0, for rows of faster modules of theirs
    Quad parts[CACHED ? larger(PARTS, 1) : 1];
    int k, o, lane;  // the thread's sum: module, row, its part

    INLINE Held(real* to, const real* from) : shared(to), packed(from) {
        for (int e = thread(); e < module_at(RESIDENT) / 4; e += THREADS)
            reinterpret_cast<Quad*>(to)[e] = quads(from)[e];
    }
    INLINE void cache() {
        lane = thread() % LANES, k = thread() / LANES / M, o = thread() / LANES - k * M;
        if (!CACHED) return;
        UNROLL for (int own = 0; own < OWN; own++)
            UNROLL for (int q = 0; q < MP / 4; q++) {
                const int row = own * COMPUTE + thread(), j = fastest_of(row);
                rows[own][q] = j < g && row < owned(j) ? quads(packed + module_at(j))[q * owned(j) + row] : Quad{};
            }
        UNROLL for (int q = 0; q < PARTS; q++)
            parts[q] = k < g && q < summed(k) / (4 * LANES)
                ? quads(packed + module_at(k) + owned(k) * MP)[(q * M + o) * LANES + lane] : Quad{};
    }

    // sums += (a row of the first matrix of module j) . v, over M
    INLINE void row(int j, int row, real (&sums)[4], const Quad* v) const {
        if (j < RESIDENT) {
            const Quad* const w = quads(shared) + module_at(j) / 4 + row;
            UNROLL_BY(AT_ONCE) for (int q = 0; q < MP / 4; q++) add_product(sums, w[q * owned(j)], v[q]);
        } else {
            const Quad* const w = quads(packed) + module_at(j) / 4 + row;
            UNROLL_BY(AT_ONCE) for (int q = 0; q < MP / 4; q++) add_product(sums, w[q * owned(j)], v[q]);
        }
    }
    // The same of the thread's own row, for the module whose turn it is
    INLINE void own_row(int j, int own, int i, real (&sums)[4], const Quad* v) const {
        if (CACHED)
            UNROLL for (int q = 0; q < MP / 4; q++) add_product(sums, rows[CACHED ? own : 0][q], v[q]);
        else
            row(j, i, sums, v);
    }

    // sums += (row of the second matrix of module j) . v, the part of one lane
    INLINE void part(int j, int row, int lane, real (&sums)[4], const Quad* v) const {
        const int begin = (module_at(j) + owned(j) * MP) / 4 + row * LANES + lane, count = summed(j) / (4 * LANES);
        if (j < RESIDENT) {
            const Quad* const w = quads(shared) + begin;
            UNROLL_BY(4) for (int q = 0; q < count; q++) add_product(sums, w[q * M * LANES], v[q * LANES + lane]);
        } else {
            const Quad* const w = quads(packed) + begin;
            UNROLL_BY(4) for (int q = 0; q < count; q++) add_product(sums, w[q * M * LANES], v[q * LANES + lane]);
        }
    }

    // Every sum of the modules that fire, over v(module), and of what is to be added(module, row): finish(module, row,
    // sum) by one of its LANES threads. A warp has a task as a whole or none.
    template <int known, class Vectors, class Added, class Finish>
    INLINE void sums(Number<known>, int most, Vectors v, Added added, Finish finish) const {
        auto end = [&](int k, int o, int lane, real(&sums)[4]) {
            real sum = total(sums);
            UNROLL for (int mask = LANES / 2; mask > 0; mask /= 2) sum += shuffle(sum, mask);
            if (lane == 0 && k < most) finish(k, o, sum);
        };
        if (uniform(thread() / 32) * 32 < most * M * LANES) {
            real sums[4] = {lane == 0 && k < most ? added(k, o) : real(0)};
            if (CACHED) {
                constexpr int count = known ? smaller(PARTS, summed(known - 1) / (4 * LANES)) : PARTS;
                // Beyond the width of a module weights are 0, and what follows is another module's.
                const Quad* const vector = v(k < most ? k : 0) + lane;
                UNROLL for (int q = 0; q < count; q++) add_product(sums, parts[CACHED ? q : 0], vector[q * LANES]);
            } else if (k < most) {
                part(k, o, lane, sums, v(k));
            }
            end(k, o, lane, sums);
        }
        if (known && known * M <= FIRST) return;
        for (int i = COMPUTE + thread(); (i & ~31) < most * M * LANES; i += COMPUTE) {
            const int lane = i % LANES, k = i / LANES / M, o = i / LANES - k * M;
            real sums[4] = {lane == 0 && k < most ? added(k, o) : real(0)};
            if (k < most) part(k, o, lane, sums, v(k));
            end(k, o, lane, sums);
        }
    }
};

#endif

#ifdef FORWARD

struct Forward {
    Weights weights;
    Batch batch;
    const real* packed;
    const value* x;   // (N, I); PROJECTED: (N, H), Wxh x, or (N, G) of the Clockwork RNN
    const real* m0;   // (B, G)
    value *memory, *hidden;  // hidden may be null
    real* last;
};

constexpr int WIDTH = PROJECTED ? (CLOCKWORK ? G : H) : I;  // of what is read at a step
constexpr int SLOT = words(WIDTH);

#ifndef SMALL

constexpr int STATE = up(ALL, 4) + up(rows_before(g), 4) + SUMMED_0 + GP;
constexpr int BYTES = (module_at(RESIDENT) + STATE) * sizeof(real) + AHEAD * (SLOT * 4 + 4);
static_assert(BYTES == FORWARD_BYTES, "ops/cuda.py counts otherwise");

KERNEL(THREADS, BLOCKS) forward(const Forward a) {
    real* const weights = reinterpret_cast<real*>(shared_memory());
    real* const biases = weights + module_at(RESIDENT);
    real* const z = biases + up(ALL, 4);
    real* const h = z + up(rows_before(g), 4);
    real* const m = h + SUMMED_0;
    unsigned* const ring = reinterpret_cast<unsigned*>(m + GP);
    int* const odd = reinterpret_cast<int*>(ring + AHEAD * SLOT);
    Held held(weights, a.packed);
    const Sequence of(a.batch);
    const int tid = thread(), lane = tid % 32;

    for (int i = tid; i < ALL; i += THREADS) biases[i] = bias(a.weights, i);
    for (int i = tid; i < SUMMED_0; i += THREADS) h[i] = 0;
    for (int i = tid; i < GP; i += THREADS)
        m[i] = i % MP < M ? a.m0[static_cast<int64>(of.b) * G + i / MP * M + i % MP] : real(0);

    auto memory_of = [&](int i) { return m + i / M * MP + i % M; };
    switch (tid < COMPUTE ? -1 : (tid - COMPUTE) / 32) {
    case 0: {  // brings x
        Walk at(of, 0, 1);
        auto fetch_step = [&] {
            const int slot = at.s & (AHEAD - 1);
            if (WIDTH && at.s < of.length) fetch<WIDTH>(ring + slot * SLOT, a.x + at.row * WIDTH, lane);
            // also behind the last step, which `send` reads, for nothing, and must not be sent astray
            if (WIDTH && sizeof(value) == 2 && lane == 0) odd[slot] = oddness(a.x + at.row * WIDTH);
            commit();
            at.go_on();
        };
        for (int s = 0; s < AHEAD - 1; s++) fetch_step();
        wait<AHEAD - 2>();
        barrier(THREADS);
        for (int s = 0; s < of.length; s++) {
            wait<AHEAD - 3>();
            barrier(THREADS);
            fetch_step();
            barrier(THREADS);
        }
        return;
    }
    case 1: {  // takes h and m
        barrier(THREADS);
        for (Walk at(of, 0, 1); at.s < of.length; at.go_on()) {
            barrier(THREADS);
            if (!CLOCKWORK && a.hidden) carry(a.hidden + at.row * H, H, [&](int i) { return h + i; }, lane);
            barrier(THREADS);
            carry(a.memory + at.row * G, G, memory_of, lane);
        }
        carry(a.last + static_cast<int64>(of.b) * G, G, memory_of, lane);
        return;
    }
    }

    held.cache();
    real Wxh[larger(HIDDEN, 1)][!PROJECTED && I && H ? I : 1];
    if (!PROJECTED && I && H)
        UNROLL for (int o = 0; o < HIDDEN; o++)
            UNROLL for (int k = 0; k < I; k++)
                Wxh[o][k] = o * COMPUTE + tid < H ? a.weights.Wxh[(o * COMPUTE + tid) * I + k] : real(0);
    barrier(THREADS);

    real z0[OWN], z1[OWN];  // of the thread's rows; z0[h part] with Wxh x of the next step
    auto memory = [&](int j) { return quads(m + j * MP); };
    // z_j = z_{j+1} + U_j m_j of the modules that fired, down to j = last
    auto slower = [&](auto KNOWN, int most, int i, int last) {
        constexpr int known = decltype(KNOWN)::value;
        real sum = most == g ? biases[i] : z[rows_before(most) + i];
        auto add = [&](int j) {
            real sums[4] = {};
            held.row(j, i, sums, memory(j));
            z[rows_before(j) + i] = sum += total(sums);
        };
        if (known) {
            UNROLL for (int j = known - 1; j > 0; j--)
                if (j >= last) add(j);
        } else {
            UNROLL_BY(2) for (int j = most - 1; j >= last; j--) add(j);
        }
        return sum;
    };
    auto send = [&](int s, auto KNOWN, int most) {
        constexpr int known = decltype(KNOWN)::value;
        UNROLL for (int o = 0; o < OWN; o++) {
            const int i = o * COMPUTE + tid;
            real sums[4] = {};
            if (i < H + M) {
                const int slot = (s + 1) & (AHEAD - 1);
                if (o < HIDDEN && i < H && WIDTH) {
                    if (PROJECTED)
                        sums[0] = fetched(ring + slot * SLOT, odd + slot, i);
                    else
                        UNROLL for (int k = 0; k < I; k++)
                            sums[k % 4] += Wxh[o < HIDDEN ? o : 0][k] * fetched(ring + slot * SLOT, odd + slot, k);
                }
                held.own_row(0, o, i, sums, memory(0));
                if (known != 1) z1[o] = slower(KNOWN, most, i, 1);
                z0[o] = z1[o] + total(sums);
                if (i >= H) z[i] = z0[o];
            } else if (known != 1 && i < H + most * M) {
                const int k = (i - H) / M;
                held.own_row(k, o, i, sums, memory(k));
                z[rows_before(k) + i] = slower(KNOWN, most, i, k + 1) + total(sums);
            }
        }
        if (known != 1)
            for (int i = OWN * COMPUTE + tid; i < H + most * M; i += COMPUTE) slower(KNOWN, most, i, (i - H) / M);
    };

    UNROLL for (int o = 0; o < OWN; o++)  // what a network of one module never changes
        z1[o] = o * COMPUTE + tid < H + M ? biases[o * COMPUTE + tid] : real(0);
    send(-1, Number<0>{}, g);
    of.each_step(
        [&](int s, auto KNOWN, int most) {
            // h = tanh(Wxh x + z_0[h part])
            UNROLL for (int o = 0; o < HIDDEN; o++)
                if (o * COMPUTE + tid < H) h[o * COMPUTE + tid] = tanh_of(z0[o]);
            barrier(THREADS);
            if (CLOCKWORK) {  // m_k = tanh(Wxh[k] x + z_k)
                const int slot = s & (AHEAD - 1);
                for (int i = tid; i < most * M; i += COMPUTE) {
                    real sum = z[rows_before(i / M) + i];
                    if (WIDTH) sum += fetched(ring + slot * SLOT, odd + slot, i);
                    m[i / M * MP + i % M] = tanh_of(sum);
                }
            } else {  // m_k = z_k[m_k part] + Whm[k] h
                held.sums(
                    KNOWN, most, [&](int) { return quads(h); },
                    [&](int k, int o) { return z[rows_before(k) + H + k * M + o]; },
                    [&](int k, int o, real sum) { m[k * MP + o] = sum; });
            }
            barrier(THREADS);
            send(s, KNOWN, most);
        },
        true);
}

#endif

#else  // the backward pass

struct Backward {
    Batch batch;
    const real* packed;
    const value *memory, *hidden, *gmemory, *ghidden;  // gradients may be null: zero
    const real* glast;
    real *gm0, *gbias;  // (B, G), (B, ALL)
    value* left;        // (N, H + M), the records of module 0: ga, gm_0; may be null, like all that follow
    int* left_of;       // (N): the row before, whose memory they are multiplied with, or ~b: that of m0
    value* ga;          // (N, G), of the Clockwork RNN
    real* records;      // of module j from record_at[j]: rows of gz_j, gm_j
    int* record_of;     // of module j from record_of_at[j]: their step's row, or ~b; NONE: not a record
    int64 record_at[g], record_of_at[g];
};

constexpr int NONE = -2147483647 - 1;
constexpr int SEEN = CLOCKWORK ? G : H;  // what a step reads beside gmemory: h, or the Clockwork RNN's m
constexpr int SLOT = words(G) + words(SEEN);

#ifndef SMALL

constexpr int STATE = summed_before(g) + up(ALL, 4) + up(G, 4) + GP;
constexpr int BYTES = (module_at(RESIDENT) + STATE) * sizeof(real) + AHEAD * (SLOT * 4 + 8);
static_assert(BYTES == BACKWARD_BYTES, "ops/cuda.py counts otherwise");

KERNEL(THREADS, BLOCKS) backward(const Backward a) {
    real* const weights = reinterpret_cast<real*>(shared_memory());
    real* const gz = weights + module_at(RESIDENT);   // of module j from summed_before(j)
    real* const gbias = gz + summed_before(g);        // gz_g
    real* const held_gm = gbias + up(ALL, 4);         // gradients of outputs, since a module fired
    real* const gm = held_gm + up(G, 4);
    unsigned* const ring = reinterpret_cast<unsigned*>(gm + GP);
    int* const odd = reinterpret_cast<int*>(ring + AHEAD * SLOT);
    Held held(weights, a.packed);
    const Sequence of(a.batch);
    const int tid = thread(), lane = tid % 32;
    auto gz_of = [&](int j, int i) { return gz + summed_before(j) + place(i); };

    for (int i = tid; i < summed_before(g) + up(ALL, 4); i += THREADS) gz[i] = 0;
    for (int i = tid; i < GP; i += THREADS) gm[i] = 0;
    for (int i = tid; i < G; i += THREADS) held_gm[i] = a.glast ? a.glast[static_cast<int64>(of.b) * G + i] : real(0);

    switch (tid < COMPUTE ? -1 : (tid - COMPUTE) / 32) {
    case 0: {  // brings the gradient of the output, and h;  gm += gradient of the output
        Walk at(of, of.length - 1, -1);
        const value* const seen = CLOCKWORK ? a.memory : a.hidden;
        auto fetch_step = [&] {
            const int slot = at.s & (AHEAD - 1);
            if (at.s >= 0) {
                const value *const one = a.gmemory + at.row * G, *const two = seen + at.row * SEEN;
                if (a.gmemory) fetch<G>(ring + slot * SLOT, one, lane);
                fetch<SEEN>(ring + slot * SLOT + words(G), two, lane);
                if (sizeof(value) == 2 && lane == 0) odd[slot * 2] = oddness(one), odd[slot * 2 + 1] = oddness(two);
            }
            commit();
            at.go_on();
        };
        for (int i = 1; i < AHEAD; i++) fetch_step();
        wait<AHEAD - 2>();
        barrier(THREADS);
        for (int s = of.length - 1; s >= -1; s--) {
            const int slot = s & (AHEAD - 1);
            if (a.gmemory && s >= 0)
                UNROLL_BY(5) for (int i = lane; i < G; i += 32)
                    held_gm[i] += fetched(ring + slot * SLOT, odd + slot * 2, i);
            wait<AHEAD - 3>();
            barrier(THREADS);
            fetch_step();
            barrier(THREADS);
        }
        return;
    }
    case 1: {  // takes the records of module 0, a step after they were computed
        barrier(THREADS);
        Walk at(of, of.length - 1, -1);
        barrier(THREADS);
        barrier(THREADS);
        for (; at.s >= 0; at.go_on()) {
            barrier(THREADS);
            if (a.left) carry(a.left + at.row * (H + M), H + M, [&](int i) { return gz_of(0, i); }, lane);
            if (a.left_of && lane == 0) a.left_of[at.row] = at.s ? static_cast<int>(at.next) : ~of.b;
            if (a.ga)
                for (int i = lane; i < G; i += 32)
                    put(a.ga + at.row * G + i, i / M < of.fires(at.s) ? *gz_of(i / M, i) : real(0));
            barrier(THREADS);
        }
        carry(a.gbias + static_cast<int64>(of.b) * ALL, ALL, [&](int i) { return gbias + i; }, lane);
        return;
    }
    case 2: {  // takes those of the other modules: gz when it is complete, then gm, which is computed from it
        const int64 before = a.batch.before(of.b);
        // Of module j at step s, or of what its initial memory receives, s = -1
        auto index = [&](int j, int s) {
            const int64 fired = s < 0 ? 0 : ((of.clock + s + 1) >> j) - (of.clock >> j);
            return (before >> j) + 2 * of.b + fired;
        };
        auto record = [&](int j, int s) { return a.records + a.record_at[j] + index(j, s) * (n(j) + M); };
        barrier(THREADS);
        int later = 0;  // modules that fired at the step after this one
        for (Walk at(of, of.length - 1, -1); at.s >= -1; at.go_on()) {
            barrier(THREADS);
            const int s = at.s, now = !a.records ? 0 : s < 0 ? g : of.fires(s);
            for (int j = 1; j < now; j++) {
                carry(record(j, s), n(j), [&](int i) { return gz_of(j, i); }, lane);
                if (s < 0)  // no gm
                    for (int o = lane; o < M; o += 32) record(j, s)[n(j) + o] = 0;
                if (lane == 0)
                    a.record_of[a.record_of_at[j] + index(j, s)] = s < 0 ? ~of.b : static_cast<int>(at.row);
            }
            if (CLOCKWORK)  // its factor is gm (1 - m^2), which lies where it was added
                for (int k = 1; k < later; k++)
                    carry(record(k, s + 1) + n(k), M, [&](int o) { return gz_of(k, k * M + o); }, lane);
            later = now;
            barrier(THREADS);
            if (!CLOCKWORK && s >= 0)
                for (int k = 1; k < now; k++)
                    carry(record(k, s) + n(k), M, [&](int o) { return gm + k * MP + o; }, lane);
        }
        for (int j = 1; j < (a.records ? g : 0); j++)
            for (int64 i = index(j, of.length - 1) + 1 + lane; i < a.batch.record(j, of.b + 1); i += 32)
                a.record_of[a.record_of_at[j] + i] = NONE;
        return;
    }
    }

    held.cache();
    barrier(THREADS);
    real g0[OWN] = {}, g1[OWN] = {};  // gz_0, gz_1 of the thread's rows

    auto step = [&](int s, auto KNOWN, int most) {
        constexpr int known = decltype(KNOWN)::value;
        // gz_{j+1} += gz_j, of the modules that fire, from module j on, which gets `sum` more
        auto pass_on = [&](int i, int first, real sum) {
            if (known) {
                UNROLL for (int j = 1; j < known; j++)
                    if (j >= first) *gz_of(j, i) = sum += *gz_of(j, i);
            } else {
                for (int j = first; j < most; j++) *gz_of(j, i) = sum += *gz_of(j, i);
            }
            *(most == g ? gbias + i : gz_of(most, i)) += sum;
        };
        UNROLL for (int o = 0; o < OWN; o++) {
            const int i = o * COMPUTE + tid;
            if (i < H + M) {
                const real sum = g1[o] + g0[o];
                if (known == 1 || (!known && most == 1)) {
                    g1[o] = sum;
                    if (g == 1 && s < 0) gbias[i] = sum;
                } else {
                    *gz_of(1, i) = sum;
                    g1[o] = 0;
                    pass_on(i, 2, sum);
                }
            } else if (known != 1 && i < H + most * M) {
                pass_on(i, (i - H) / M, 0);
            }
        }
        if (known != 1)
            for (int i = OWN * COMPUTE + tid; i < H + most * M; i += COMPUTE) pass_on(i, (i - H) / M, 0);
        barrier(THREADS);

        // gm_k += U_k^T gz_k
        held.sums(
            KNOWN, most, [&](int k) { return quads(gz + summed_before(k)); },
            [&](int k, int o) { return held_gm[k * M + o]; },
            [&](int k, int o, real sum) {
                gm[k * MP + o] = sum;
                held_gm[k * M + o] = 0;
                if (known == 0 && s < 0) a.gm0[static_cast<int64>(of.b) * G + k * M + o] = sum;
            });
        barrier(THREADS);
        if (known == 0 && s < 0) return;

        const int slot = s & (AHEAD - 1);
        auto read = [&](int i) { return fetched(ring + slot * SLOT + words(G), odd + slot * 2 + 1, i); };
        auto clear = [&](int i, int first) {  // gz_j = 0
            if (known) {
                UNROLL for (int j = 2; j < known; j++)
                    if (j >= first) *gz_of(j, i) = 0;
            } else {
                for (int j = first; j < most; j++) *gz_of(j, i) = 0;
            }
        };
        auto of_memory = [&](int i) {  // gm_k; of the Clockwork RNN gm_k (1 - m^2)
            const real part = gm[(i - H) / M * MP + (i - H) % M];
            if (!CLOCKWORK) return part;
            const real m = read(i);
            return part * (1 - m * m);
        };
        auto slower = [&](int i) {  // gz_k[m_k part] = gm_k
            *gz_of((i - H) / M, i) = of_memory(i);
            clear(i, (i - H) / M + 1);
        };
        UNROLL for (int o = 0; o < OWN; o++) {
            const int i = o * COMPUTE + tid;
            if (o < HIDDEN && i < H) {  // ga = (sum_k Whm[k]^T gm_k) (1 - h^2);  gz_0[h part] = ga
                const real h = read(i);
                real sums[4] = {};
                if (a.ghidden) sums[0] = widen(a.ghidden[of.row(s) * H + i]);
                held.own_row(0, o, i, sums, quads(gm));
                if (known) {
                    UNROLL for (int k = 1; k < known; k++) held.row(k, i, sums, quads(gm + k * MP));
                } else {
                    UNROLL_BY(2) for (int k = 1; k < most; k++) held.row(k, i, sums, quads(gm + k * MP));
                }
                gz[i] = g0[o] = total(sums) * (1 - h * h);
                clear(i, 2);
            } else if (i < H + M) {
                *gz_of(0, i) = g0[o] = of_memory(i);
                clear(i, 2);
            } else if (known != 1 && i < H + most * M) {
                slower(i);
            }
        }
        if (known != 1)
            for (int i = OWN * COMPUTE + tid; i < H + most * M; i += COMPUTE) slower(i);
    };
    of.each_step(step, false);
    step(-1, Number<0>{}, g);  // what the initial memories receive
}

#endif

// Sums of outer products: per module, over a chunk of its records,
//
//     A = gz_j m_j^T, n(j) x M      B = gm_j h^T, M x K (of the Clockwork RNN gm_j x^T)      C = ga x^T, H x I, module 0
//
// A thread has a tile of eight values of the wide factor (gz, h, ga) by four of the narrow one (m, gm, x).
constexpr int K = CLOCKWORK ? I : H;
constexpr int C_WIDTH = CLOCKWORK || PROJECTED ? 0 : I;
constexpr int outputs(int j) { return n(j) * M + M * K + (j == 0 ? H * C_WIDTH : 0); }
constexpr int STAGED = up(ALL, 8) + up(K, 8) + 2 * MP + up(C_WIDTH, 4);  // values of a record, the most
constexpr int UNIT = QUADS && K % 4 == 0 && C_WIDTH % 4 == 0 ? 4 : 1;  // values that are staged together
constexpr int SLOTS = (BATCHED * STAGED / UNIT + TILES - 1) / TILES;  // that a thread stages
static_assert(BATCHED * (STAGED * sizeof(real) + 8) == PRODUCTS_BYTES, "ops/cuda.py counts otherwise");

template <class T> struct alignas(UNIT * sizeof(T) < 16 ? UNIT * sizeof(T) : 16) Unit { T v[UNIT]; };

struct Products {
    Batch batch;
    int64 N, chunk;  // records of each chunk
    const value *x, *memory, *hidden, *left;
    const int* left_of;
    const real *m0, *records;
    const int* record_of;
    int64 record_at[g], record_of_at[g];
    real* sums;  // one module after the other, one chunk after the other: A, B, C
};

INLINE int64 record_count(int64 N, int64 B, int j) { return j ? (N >> j) + 2 * B : N; }
INLINE int chunks(int64 N, int64 B, int j, int64 chunk) {
    return static_cast<int>((record_count(N, B, j) + chunk - 1) / chunk);
}
INLINE int64 sums_at(int64 N, int64 B, int j, int64 chunk) {
    int64 at = 0;
    for (int i = 0; i < j; i++) at += static_cast<int64>(chunks(N, B, i, chunk)) * outputs(i);
    return at;
}

KERNEL(TILES, 2) products(const Products a) {
    real* const staged = reinterpret_cast<real*>(shared_memory());
    int* const wheres = reinterpret_cast<int*>(staged + BATCHED * STAGED);  // of this batch and of the next
    const int tid = thread();
    int j = 0, p = block();
    for (int count; p >= (count = chunks(a.N, a.batch.B, j, a.chunk)); j++) p -= count;
    const int64 first = p * a.chunk, end = record_count(a.N, a.batch.B, j);
    const int64 found = end - first < a.chunk ? end - first : a.chunk;
    const int batches = static_cast<int>((found + BATCHED - 1) / BATCHED);

    // A staged record: gz, h (or x), m, gm, x
    const int h_at = up(n(j), 8), m_at = h_at + up(K, 8), gm_at = m_at + MP, x_at = gm_at + MP;
    const int width = x_at + (j ? 0 : up(C_WIDTH, 4)), units = BATCHED * (width / UNIT);
    // What the thread stages, one slot at a time: where the values are of the first batch, and how far it is from record to
    // record, or from row to row of their steps.
    enum Kind { NOTHING, RECORD, WIDE_RECORD, ROW, MEMORY };
    const int* const where_of = j ? a.record_of + a.record_of_at[j] + first : a.left_of + first;
    const void* from[SLOTS];
    int pitch[SLOTS], record_of_slot[SLOTS];
    Kind kind[SLOTS];
    UNROLL for (int o = 0; o < SLOTS; o++) {
        const int e = (o * TILES + tid) / (width / UNIT), q = (o * TILES + tid) % (width / UNIT) * UNIT;
        const bool is_gm = q >= gm_at && q < gm_at + M;
        from[o] = nullptr, pitch[o] = 0, kind[o] = NOTHING, record_of_slot[o] = smaller(e, BATCHED - 1);
        if (e >= BATCHED) {
        } else if (q < n(j) || is_gm) {
            const int i = is_gm ? (j ? n(j) : H) + q - gm_at : q;
            pitch[o] = j ? n(j) + M : H + M;
            kind[o] = j ? WIDE_RECORD : RECORD;
            if (j)
                from[o] = a.records + a.record_at[j] + (first + e) * pitch[o] + i;
            else
                from[o] = a.left + (first + e) * pitch[o] + i;
        } else if (q >= h_at && q < h_at + K) {
            pitch[o] = K, kind[o] = j ? ROW : RECORD;
            from[o] = (CLOCKWORK ? a.x : a.hidden) + (j ? 0 : first + e) * K + q - h_at;
        } else if (q >= m_at && q < m_at + M) {
            pitch[o] = G, kind[o] = MEMORY;
            from[o] = a.memory + j * M + q - m_at;
        } else if (C_WIDTH && j == 0 && q >= x_at && q < x_at + C_WIDTH) {
            pitch[o] = I, kind[o] = RECORD;
            from[o] = a.x + (first + e) * I + q - x_at;
        }
    }
    auto where = [&](int e) { return e < found ? where_of[e] : NONE; };
    Unit<real> loaded[SLOTS];
    auto load = [&](int batch) {
        UNROLL for (int o = 0; o < SLOTS; o++) {
            const int at = wheres[(batch & 1) * BATCHED + record_of_slot[o]];
            Unit<real> unit = {};
            auto narrow = [&](int64 index) {
                const Unit<value> found =
                    *reinterpret_cast<const Unit<value>*>(static_cast<const value*>(from[o]) + index * pitch[o]);
                UNROLL for (int i = 0; i < UNIT; i++) unit.v[i] = widen(found.v[i]);
            };
            if (at == NONE) {
            } else if (kind[o] == RECORD) {
                narrow(batch * BATCHED);
            } else if (kind[o] == WIDE_RECORD) {
                unit = *reinterpret_cast<const Unit<real>*>(
                    static_cast<const real*>(from[o]) + static_cast<int64>(batch * BATCHED) * pitch[o]);
            } else if ((kind[o] == ROW || kind[o] == MEMORY) && at >= 0) {
                narrow(at);
            } else if (kind[o] == MEMORY) {
                const int i = static_cast<int>(static_cast<const value*>(from[o]) - a.memory);
                unit = *reinterpret_cast<const Unit<real>*>(a.m0 + static_cast<int64>(~at) * G + i);
            }
            loaded[o] = unit;
        }
    };
    if (tid < BATCHED) wheres[tid] = where(tid);
    barrier(TILES);
    load(0);
    int next = tid < BATCHED ? where(BATCHED + tid) : 0;

    const int in_A = up(n(j), 8) / 8 * (MP / 4), in_B = up(K, 8) / 8 * (MP / 4);
    constexpr int C_QUADS = larger(up(C_WIDTH, 4) / 4, 1);
    const int in_C = C_WIDTH && j == 0 ? up(H, 8) / 8 * C_QUADS : 0;
    const int tile = column() * TILES + tid;
    int wide = 0, narrow = -1;  // where the tile's factors are
    if (tile < in_A)
        wide = tile / (MP / 4) * 8, narrow = m_at + tile % (MP / 4) * 4;
    else if (tile < in_A + in_B)
        wide = h_at + (tile - in_A) / (MP / 4) * 8, narrow = gm_at + (tile - in_A) % (MP / 4) * 4;
    else if (tile < in_A + in_B + in_C)
        wide = (tile - in_A - in_B) / C_QUADS * 8, narrow = x_at + (tile - in_A - in_B) % C_QUADS * 4;

    real sums[8][4] = {};
    for (int batch = 0; batch < batches; batch++) {
        barrier(TILES);
        UNROLL for (int o = 0; o < SLOTS; o++)
            if (o * TILES + tid < units) reinterpret_cast<Unit<real>*>(staged)[o * TILES + tid] = loaded[o];
        if (tid < BATCHED) wheres[((batch + 1) & 1) * BATCHED + tid] = next;
        barrier(TILES);
        if (batch + 1 < batches) {
            load(batch + 1);
            if (tid < BATCHED) next = where((batch + 2) * BATCHED + tid);
        }
        if (narrow >= 0)
            UNROLL for (int e = 0; e < BATCHED; e++) {
                const Quad low = quads(staged + e * width + wide)[0], high = quads(staged + e * width + wide)[1];
                const Quad right = *quads(staged + e * width + narrow);
                UNROLL for (int i = 0; i < 4; i++)
                    UNROLL for (int k = 0; k < 4; k++) {
                        sums[i][k] += low.v[i] * right.v[k];
                        sums[4 + i][k] += high.v[i] * right.v[k];
                    }
            }
    }
    if (narrow < 0) return;
    real* const to = a.sums + sums_at(a.N, a.batch.B, j, a.chunk) + static_cast<int64>(p) * outputs(j);
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int k = 0; k < 4; k++) {
            if (tile < in_A) {
                const int row = wide + i, o = narrow - m_at + k;
                if (row < n(j) && o < M) to[row * M + o] = sums[i][k];
            } else if (tile < in_A + in_B) {
                const int row = wide - h_at + i, o = narrow - gm_at + k;
                if (row < K && o < M) to[n(j) * M + o * K + row] = sums[i][k];
            } else {
                const int row = wide + i, o = narrow - x_at + k;
                if (row < H && o < C_WIDTH) to[n(j) * M + M * K + row * I + o] = sums[i][k];
            }
        }
}

struct Gather {
    int64 N, B, chunk;
    const real *sums, *gbias;
    real* gradients;  // one weight after the other, as ops/weights.py lists them
};

// A block has 32 weights; each of its warps takes every eighth chunk of all.
KERNEL(256) gather(const Gather a) {
    constexpr int WXH = CLOCKWORK ? 0 : H * I, B_H = BIASED ? H : 0;
    constexpr int WMH = g * H * M, WHM = g * M * K, WMM = rows_before(g) * M - WMH;
    constexpr int COUNT = WXH + B_H + WMH + WHM + WMM + (BIASED ? G : 0);
    int e = block() * 32 + thread() % 32;
    const bool wanted = e < COUNT && !(PROJECTED && !CLOCKWORK && e < WXH);  // those are a plain product
    real* const to = a.gradients + e;
    const real* from = nullptr;
    int stride = 0, terms = 0;
    auto module = [&](int j, int index) {
        from = a.sums + sums_at(a.N, a.B, j, a.chunk) + index;
        stride = outputs(j), terms = chunks(a.N, a.B, j, a.chunk);
    };
    auto of_bias = [&](int index) { from = a.gbias + index, stride = ALL, terms = static_cast<int>(a.B); };
    if (!wanted)
        ;
    else if (e < WXH)
        module(0, n(0) * M + M * K + e);
    else if ((e -= WXH) < B_H)
        of_bias(e);
    else if ((e -= B_H) < WMH)
        module(e / (larger(H, 1) * M), e % (larger(H, 1) * M));
    else if ((e -= WMH) < WHM)
        module(e / larger(M * K, 1), n(e / larger(M * K, 1)) * M + e % larger(M * K, 1));
    else if ((e -= WHM) < WMM) {
        int j = 0;
        while (e >= (j + 1) * M * M) e -= (j + 1) * M * M, j++;
        module(j, H * M + e);
    } else
        of_bias(H + e - WMM);

    real sum = 0;
    UNROLL_BY(4) for (int p = thread() / 32; p < terms; p += 8) sum += from[static_cast<int64>(p) * stride];
    real* const sums = reinterpret_cast<real*>(shared_memory());
    sums[thread()] = sum;
    barrier(256);
    if (thread() >= 32 || !wanted) return;
    UNROLL for (int i = 1; i < 8; i++) sum += sums[i * 32 + thread()];
    *to = sum;
}

#endif
