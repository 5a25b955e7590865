// The clocked recurrence and its adjoint on the CPU: plain C++17, no torch headers, a C ABI over raw pointers.
//
// A module that did not fire need not be multiplied again. With U_j = [Wmh[j]; Wmm[j->1] .. Wmm[j->j]],
// (H + jM) x M, and the suffix sums z_j = z_{j+1} + U_j m_j, one step is
//
//     h   = tanh(Wxh x + z_1[h part])
//     m_k = Whm[k] h + z_k[m_k part]                     k = 1..c, the modules that fire
//     z_j = z_{j+1} + U_j m_j                            j = c..1, on the first H + jM rows
//
// where z_{g+1} holds the biases. So a step costs the same for any number of modules, on average. Its adjoint,
// in reverse time:
//
//     gm += gradient of the output
//     gm_j += U_j^T gz_j;  gz_{j+1} += gz_j;  dU_j += gz_j m_j^T;  gz_j = 0                j = 1..c
//     gh = sum_k Whm[k]^T gm_k;  dWhm[k] += gm_k h^T;  gz_k[m_k part] += gm_k;  gm_k = 0   k = 1..c
//     ga = gh (1 - h^2);  gz_1[h part] += ga;  gx = Wxh^T ga;  dWxh += ga x^T
//
// and, once more, the second line for all j with the initial memories. The Clockwork RNN has no h:
// m_k = tanh(Wxh[k] x + z_k[m_k part]), and U_j = [Whh[j->1] .. Whh[j->j]].
//
// Features lie along the SIMD lanes, so data keep the layout torch gives them, a single sequence fills the
// lanes as well as a batch does, and every row follows its own clock. A batch is cut into blocks of equal size that
// go through time one by one; rows of a block that are at the same point of their clocks are a tile, and share each
// load of a weight. What a block computes, and in which order gradients are added, depends on the sizes alone: never
// on the number of threads.
//
// Modules are numbered from 0 below. The file includes itself once per instruction set.

#ifndef MSLMN_ISA

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using std::int64_t;

constexpr int64_t TILE = 13;  // rows of a block at most: two vectors of each fit 32 registers

// What is to be computed; ops/cpu.py lists the same in the same order.
struct Problem {
    int64_t steps, batch, I, H, M, g;  // H = 0: the Clockwork RNN
    int64_t reverse, threads;
    const int64_t* offsets;  // step t of a packed batch: rows offsets[t] .. offsets[t+1]; null: every row at every t
    const int64_t* clock;    // (batch): steps consumed before

    // The batch is halved until the parts fit: so they are equal, and two, four, .. threads share them equally.
    int64_t blocks() const {
        int64_t n = std::min<int64_t>(batch, 1);
        while (n * TILE < batch) n *= 2;
        return n;
    }
    int64_t begin(int64_t i) const { return i * batch / blocks(); }  // where block i does

    int64_t G() const { return g * M; }
    int64_t n(int64_t j) const { return H + (j + 1) * M; }  // rows of U_j
    int64_t first(int64_t t) const { return offsets ? offsets[t] : t * batch; }
    int64_t rows(int64_t t) const { return offsets ? offsets[t + 1] - offsets[t] : batch; }
    int64_t length(int64_t b) const {
        if (!offsets) return steps;
        int64_t low = 0, high = steps;  // rows(t) never grows: the first t that b does not have
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (rows(middle) > b) low = middle + 1; else high = middle;
        }
        return low;
    }
};

// clock.py, in C++: how many modules fire at step t = 1, 2, ..
inline int64_t active(int64_t t, int64_t g) {
    return t == 0 ? g : std::min<int64_t>(g, 1 + __builtin_ctzll(static_cast<unsigned long long>(t)));
}

// Parameters, or their gradients, as torch holds them: pointers, null where there is none. The Clockwork RNN has g
// Wxh and b_h, in the place of Whm and b_m, and its Whh in the place of Wmm.
template <class T> struct Weights {
    T *const Wxh, *const b_h;
    T *const *Wmh, *const *Whm, *const *Wmm, *const *b_m;
    Weights(T* const* p, int64_t g)
        : Wxh(p[0]), b_h(p[1]), Wmh(p + 2), Whm(p + 2 + g), Wmm(p + 2 + 2 * g), b_m(p + 2 + 3 * g) {}
};

// Their gradients, as one block of memory holds them, one after the other: pointers to each, null where there is none.
template <class T> std::vector<T*> places(const Problem& p, const T* const* weights, T* flat) {
    std::vector<int64_t> sizes{p.H * p.I, p.H};
    sizes.insert(sizes.end(), p.g, p.H * p.M);
    sizes.insert(sizes.end(), p.g, p.M * (p.H ? p.H : p.I));
    for (int64_t j = 0; j < p.g; j++) sizes.push_back((j + 1) * p.M * p.M);
    sizes.insert(sizes.end(), p.g, p.M);
    std::vector<T*> found;
    for (std::size_t i = 0; i < sizes.size(); i++) {
        found.push_back(weights[i] ? flat : nullptr);
        if (weights[i]) flat += sizes[i];
    }
    return found;
}

// ops/cpu.py lists the same in the same order, here and below.
template <class T> struct Forward {
    const T *x, *m0;
    const T* const* weights;
    T *memory, *hidden, *last;  // hidden: may be null
};

template <class T> struct Backward {
    const T *x, *m0, *memory, *hidden;
    const T* const* weights;
    const T *gmemory, *ghidden, *glast;  // may be null: zero
    T *gx, *gm0;                         // gx: may be null, not wanted
    T* gweights;                         // may be null, not wanted
};

// The workspace of a call. It is kept for the thread's next call, so that a step of training does not fetch and return
// the same pages each time; what is larger than KEEP is returned.
class Arena {
#ifdef MSLMN_POISON
    static constexpr std::size_t KEEP = 0;  // tests: every buffer by itself, so that a sanitizer sees its bounds
#else
    static constexpr std::size_t KEEP = 32 << 20;
#endif
    char* kept = nullptr;
    std::size_t capacity = 0, used = 0;
    std::vector<void*> extra;

    static char* fetch(std::size_t bytes) {
        void* p = std::aligned_alloc(64, bytes);
        if (!p) throw std::bad_alloc();
        return static_cast<char*>(p);
    }

  public:
    ~Arena() { release(), std::free(kept); }

    void* take(std::size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        used += bytes;
        if (used <= capacity) return kept + used - bytes;
        extra.reserve(extra.size() + 1);
        extra.push_back(fetch(bytes));
        return extra.back();
    }

    void release() {
        for (void* p : extra) std::free(p);
        extra.clear();
        if (used > capacity && used <= KEEP) {
            std::free(kept);
            kept = static_cast<char*>(std::aligned_alloc(64, used));
            capacity = kept ? used : 0;
        }
        used = 0;
    }

    static Arena& mine() {
        static thread_local Arena arena;
        return arena;
    }
    struct Call {
        ~Call() { mine().release(); }
    };
};

// Memory of the current call; vectors may be loaded from up to a vector beyond its end.
template <class T> class Buffer {
    T* data;

  public:
    explicit Buffer(int64_t size, bool clear = true) {
        const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(T) + 64;
        data = static_cast<T*>(Arena::mine().take(bytes));
#ifdef MSLMN_POISON  // tests: what is not cleared is NaN
        std::memset(static_cast<void*>(data), 0xff, bytes);
#endif
        if (clear) std::memset(static_cast<void*>(data), 0, bytes);
    }
    T* get() const { return data; }
};

constexpr int64_t WHOLE = 6;     // rows of a tile whose weight gradients are added at once, without saving them up
constexpr int64_t GROUPS = 16;   // at most so many partial sums of weight gradients
constexpr int64_t RECORDS = 32;  // steps whose weight gradients are added at once
constexpr double WORTH_A_THREAD = 3e5;  // multiply-adds: below, waking a thread costs more than it saves

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Mean multiply-adds of a forward pass.
inline double work(const Problem& p) {
    double per_row = 0, share = 1;
    for (int64_t j = 0; j < p.g; j++, share /= 2)
        per_row += share * static_cast<double>(p.M * (p.n(j) + (p.H ? p.H : p.I)));
    per_row += static_cast<double>(p.H * p.I);
    return per_row * static_cast<double>(p.steps * p.batch);
}

// Calls body(item, thread) for items 0 .. items - 1, in no particular order. With OpenMP the threads are those torch
// keeps warm.
template <class Body> void parallel(int64_t items, int64_t threads, Body body) {
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (threads > 1)
    for (int64_t i = 0; i < items; i++) body(i, omp_get_thread_num());
#else
    std::atomic<int64_t> next{0};
    auto worker = [&](int64_t thread) {
        for (int64_t i; (i = next++) < items;) body(i, thread);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t thread = 1; thread < threads; thread++) others.emplace_back(worker, thread);
    } catch (const std::system_error&) {
        // No more threads to be had: those that run do it all.
    }
    worker(0);
    for (auto& other : others) other.join();
#endif
}

inline int64_t useful_threads(const Problem& p, int64_t items, double passes) {
    return std::max<int64_t>(1, std::min({p.threads, items, static_cast<int64_t>(passes * work(p) / WORTH_A_THREAD)}));
}

}  // namespace

#define MSLMN_ISA baseline
#define MSLMN_BYTES 16
#define MSLMN_REGISTERS 16
#include "cpu.cpp"
#undef MSLMN_ISA
#undef MSLMN_BYTES

#if defined(__x86_64__)

#define MSLMN_ISA avx2
#define MSLMN_BYTES 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "cpu.cpp"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef MSLMN_ISA
#undef MSLMN_BYTES
#undef MSLMN_REGISTERS

#define MSLMN_ISA avx512
#define MSLMN_BYTES 64
#define MSLMN_REGISTERS 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma,prefer-vector-width=512")
#endif
#include "cpu.cpp"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef MSLMN_ISA
#undef MSLMN_BYTES
#undef MSLMN_REGISTERS

#endif

namespace {

enum Isa { BASELINE, AVX2, AVX512 };

Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return BASELINE;
}

// Short rows waste the lanes of long vectors, and cost more to fit into them than they save.
template <class T> int fitting(int isa, const Problem& p) {
    if (isa >= 0) return isa;
    const int64_t module = p.M * static_cast<int64_t>(sizeof(T)), hidden = p.H * static_cast<int64_t>(sizeof(T));
    if (module <= 16 && hidden <= 128) return BASELINE;
    return std::min<int>(best_isa(), module <= 32 ? AVX2 : AVX512);
}

template <class T> int run_forward(int isa, const Problem& p, const Forward<T>& x) {
    const Arena::Call call;
    isa = fitting<T>(isa, p);
    try {
#if defined(__x86_64__)
        if (isa == AVX512) return avx512::forward(p, x), 0;
        if (isa == AVX2) return avx2::forward(p, x), 0;
#endif
        return baseline::forward(p, x), 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

template <class T> int run_backward(int isa, const Problem& p, const Backward<T>& x) {
    const Arena::Call call;
    isa = fitting<T>(isa, p);
    try {
#if defined(__x86_64__)
        if (isa == AVX512) return avx512::backward(p, x), 0;
        if (isa == AVX2) return avx2::backward(p, x), 0;
#endif
        return baseline::backward(p, x), 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

// The C ABI. Results: 0, or 1 where memory ran out. `isa`: 0 baseline, 1 AVX2, 2 AVX-512, at most the best; -1: what
// fits the sizes best.
extern "C" {
int mslmn_best_isa() { return best_isa(); }
int mslmn_forward_f32(int isa, const Problem* p, const Forward<float>* x) { return run_forward(isa, *p, *x); }
int mslmn_forward_f64(int isa, const Problem* p, const Forward<double>* x) { return run_forward(isa, *p, *x); }
int mslmn_backward_f32(int isa, const Problem* p, const Backward<float>* x) { return run_backward(isa, *p, *x); }
int mslmn_backward_f64(int isa, const Problem* p, const Backward<double>* x) { return run_backward(isa, *p, *x); }
}

#else  // MSLMN_ISA: what follows is compiled once per instruction set

namespace {
namespace MSLMN_ISA {

#define MSLMN_INLINE inline __attribute__((always_inline))

template <class T> struct Simd;
template <> struct Simd<float> {
    typedef float V __attribute__((vector_size(MSLMN_BYTES), aligned(4), may_alias));
    typedef std::int32_t Int __attribute__((vector_size(MSLMN_BYTES), aligned(4), may_alias));
    static constexpr int mantissa = 23, bias = 127, terms = 7;
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    static constexpr float one_from = 10.0f;     // beyond, tanh is 1 to the last bit
};
template <> struct Simd<double> {
    typedef double V __attribute__((vector_size(MSLMN_BYTES), aligned(8), may_alias));
    typedef std::int64_t Int __attribute__((vector_size(MSLMN_BYTES), aligned(8), may_alias));
    static constexpr int mantissa = 52, bias = 1023, terms = 14;
    static constexpr double ln2_high = 0x1.62e42fee00000p-1, ln2_low = 0x1.a39ef35793c76p-33;
    static constexpr double round = 6755399441055744.0, one_from = 20.0;
};
template <class T> using Vec = typename Simd<T>::V;
template <class T> constexpr int LANES = MSLMN_BYTES / sizeof(T);

template <class T> MSLMN_INLINE Vec<T> load(const T* p) { return *reinterpret_cast<const Vec<T>*>(p); }
template <class T> MSLMN_INLINE void store(T* p, Vec<T> v) { *reinterpret_cast<Vec<T>*>(p) = v; }
template <class T> inline int64_t padded(int64_t n) { return ceil_div(n, LANES<T>) * LANES<T>; }

// tanh |x| = -e / (e + 2), e = expm1(-2 |x|) = 2^k expm1(r) + (2^k - 1), r = -2 |x| - k ln 2 in +-ln(2)/2,
// expm1(r) by its Taylor series: a few units in the last place everywhere, tiny x included; NaN stays NaN.
template <class T> MSLMN_INLINE Vec<T> tanh_of(Vec<T> x) {
    using S = Simd<T>;
    const Vec<T> zero{}, limit = zero + S::one_from;
    Vec<T> size = x < zero ? -x : x;
    size = size > limit ? limit : size;
    const Vec<T> y = size * T(-2);
    const Vec<T> shifted = y * T(1.4426950408889634) + S::round;
    const Vec<T> k = shifted - S::round;
    const Vec<T> r = (y - k * S::ln2_high) - k * S::ln2_low;
    constexpr double inverse_factorial[] = {
        1.0,         1.0,          1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,        1.0 / 720,
        1.0 / 5040,  1.0 / 40320,  1.0 / 362880,  1.0 / 3628800,  1.0 / 39916800,  1.0 / 479001600,
        1.0 / 6227020800, 1.0 / 87178291200};
    Vec<T> series = zero + T(inverse_factorial[S::terms]);
#pragma GCC unroll 16
    for (int i = S::terms - 1; i >= 1; i--) series = series * r + T(inverse_factorial[i]);
    const Vec<T> round = zero + S::round;
    const typename S::Int exponent =
        (reinterpret_cast<typename S::Int>(shifted) - reinterpret_cast<typename S::Int>(round) + S::bias) << S::mantissa;
    const Vec<T> two_k = reinterpret_cast<Vec<T>>(exponent);
    const Vec<T> e = two_k * (series * r) + (two_k - T(1));
    const Vec<T> result = -e / (e + T(2));
    return x < zero ? -result : result;
}

// out[b] = init[b] + sum_k in[b][k] W[k], for NB rows b and RV vectors of each: NB x RV sums in registers. Where
// that would be too few to hide the latency of a multiply-add, each is kept in KS parts. Rows of in, init and out lie
// at the same stride, so that there are few addresses to compute: the sums are short.
template <class T, int NB, int RV>
MSLMN_INLINE void product_tile(const T* W, int64_t ld, int64_t K, const T* in, const T* init, T* out, int64_t stride) {
    constexpr int L = LANES<T>, KS = NB * RV >= 8 ? 1 : NB * RV >= 4 ? 2 : 4;
    Vec<T> sum[KS][NB][RV] = {};
#pragma GCC unroll 16
    for (int b = 0; b < NB; b++)
#pragma GCC unroll 8
        for (int v = 0; v < RV; v++) sum[0][b][v] = load(init + b * stride + v * L);
    int64_t k = 0;
    for (; k + KS <= K; k += KS)
#pragma GCC unroll 4
        for (int s = 0; s < KS; s++) {
            Vec<T> w[RV];
#pragma GCC unroll 8
            for (int v = 0; v < RV; v++) w[v] = load(W + (k + s) * ld + v * L);
#pragma GCC unroll 16
            for (int b = 0; b < NB; b++) {
                const T x = in[b * stride + k + s];
#pragma GCC unroll 8
                for (int v = 0; v < RV; v++) sum[s][b][v] += w[v] * x;
            }
        }
    if constexpr (KS > 1)
        for (; k < K; k++)
            for (int b = 0; b < NB; b++)
                for (int v = 0; v < RV; v++) sum[0][b][v] += load(W + k * ld + v * L) * in[b * stride + k];
#pragma GCC unroll 16
    for (int b = 0; b < NB; b++)
#pragma GCC unroll 8
        for (int v = 0; v < RV; v++) {
            for (int s = 1; s < KS; s++) sum[0][b][v] += sum[s][b][v];
            store(out + b * stride + v * L, sum[0][b][v]);
        }
}

template <class T, int NB, int RV>
MSLMN_INLINE void product_rest(int64_t vectors, const T* W, int64_t ld, int64_t K, const T* in, const T* init, T* out,
                               int64_t stride) {
    if constexpr (RV > 0) {
        if (vectors == RV)
            product_tile<T, NB, RV>(W, ld, K, in, init, out, stride);
        else
            product_rest<T, NB, RV - 1>(vectors, W, ld, K, in, init, out, stride);
    }
}

// The same for any number of vectors.
template <class T, int NB>
__attribute__((noinline)) void product_rows(const T* W, int64_t ld, int64_t K, int64_t vectors, const T* in,
                                            const T* init, T* out, int64_t stride) {
    constexpr int L = LANES<T>, RV = std::max(1, std::min(6, (MSLMN_REGISTERS == 32 ? 26 : 12) / NB));
    int64_t v = 0;
    for (; v + RV <= vectors; v += RV)
        product_tile<T, NB, RV>(W + v * L, ld, K, in, init + v * L, out + v * L, stride);
    product_rest<T, NB, RV - 1>(vectors - v, W + v * L, ld, K, in, init + v * L, out + v * L, stride);
}

template <class T, std::size_t... N> constexpr auto products(std::index_sequence<N...>) {
    return std::array{&product_rows<T, N + 1>...};
}

// The same for any number of rows, in equal parts whose sums, of two vectors or more, fit the registers. W is (K, ld),
// rows of W, init and out hold `vectors` vectors.
template <class T>
MSLMN_INLINE void product(int64_t rows, const T* W, int64_t ld, int64_t K, int64_t vectors, const T* in, const T* init,
                          T* out, int64_t stride) {
    constexpr int64_t MOST = MSLMN_REGISTERS == 32 ? TILE : 6;
    static constexpr auto by_rows = products<T>(std::make_index_sequence<MOST>());
    if (rows <= MOST) return by_rows[rows - 1](W, ld, K, vectors, in, init, out, stride);
    for (int64_t parts = ceil_div(rows, MOST), b = 0; parts > 0; parts--) {
        const int64_t n = ceil_div(rows - b, parts);
        by_rows[n - 1](W, ld, K, vectors, in + b * stride, init + b * stride, out + b * stride, stride);
        b += n;
    }
}

// W[i] += sum_k left[k][i] right[k], for RR rows i of CV vectors.
template <class T, int RR, int CV>
__attribute__((noinline)) void outer_tile(T* W, int64_t K, const T* left, int64_t left_stride, const T* right,
                                          int64_t right_stride) {
    constexpr int L = LANES<T>, ld = CV * L;
    Vec<T> sum[RR][CV];
#pragma GCC unroll 16
    for (int i = 0; i < RR; i++)
#pragma GCC unroll 4
        for (int v = 0; v < CV; v++) sum[i][v] = load(W + i * ld + v * L);
    for (int64_t k = 0; k < K; k++) {
        Vec<T> r[CV];
#pragma GCC unroll 4
        for (int v = 0; v < CV; v++) r[v] = load(right + k * right_stride + v * L);
#pragma GCC unroll 16
        for (int i = 0; i < RR; i++) {
            const T x = left[k * left_stride + i];
#pragma GCC unroll 4
            for (int v = 0; v < CV; v++) sum[i][v] += r[v] * x;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < RR; i++)
#pragma GCC unroll 4
        for (int v = 0; v < CV; v++) store(W + i * ld + v * L, sum[i][v]);
}

template <class T, int CV, std::size_t... N> constexpr auto outers(std::index_sequence<N...>) {
    return std::array{&outer_tile<T, N + 1, CV>...};
}

// The same for any number of rows, in equal parts: few rows are too few sums to hide the latency of a multiply-add.
template <class T, int CV>
MSLMN_INLINE void outer_rows(T* W, int64_t rows, int64_t K, const T* left, int64_t left_stride, const T* right,
                             int64_t right_stride) {
    constexpr int64_t MOST = MSLMN_REGISTERS == 32 ? 12 : 6;
    static constexpr auto by_rows = outers<T, CV>(std::make_index_sequence<MOST>());
    for (int64_t parts = ceil_div(rows, MOST), i = 0; parts > 0; parts--) {
        const int64_t n = ceil_div(rows - i, parts);
        by_rows[n - 1](W + i * CV * LANES<T>, K, left + i, left_stride, right, right_stride);
        i += n;
    }
}

// The same for any number of vectors, two by two: first all rows of the first two, and so on.
template <class T>
void outer(T* W, int64_t rows, int64_t vectors, int64_t K, const T* left, int64_t left_stride, const T* right,
           int64_t right_stride) {
    constexpr int L = LANES<T>;
    int64_t v = 0;
    for (; v + 2 <= vectors; v += 2)
        outer_rows<T, 2>(W + v * L * rows, rows, K, left, left_stride, right + v * L, right_stride);
    if (v < vectors) outer_rows<T, 1>(W + v * L * rows, rows, K, left, left_stride, right + v * L, right_stride);
}

// Rows of n values as torch holds them, read as whole vectors: zeros after the last value, nothing read beyond it.
template <class T> class Rows {
    static constexpr int L = LANES<T>;
    int64_t n, whole;
    typename Simd<T>::Int from, inside;  // the lanes that bring a vector that ends with the row to its start

  public:
    explicit Rows(int64_t n) : n(n), whole(n / L * L) {
        for (int i = 0; i < L; i++) {
            from[i] = (i + static_cast<int>(L - (n - whole))) & (L - 1);
            inside[i] = whole + i < n ? -1 : 0;
        }
    }
    MSLMN_INLINE Vec<T> rest(const T* row) const {
        Vec<T> v{};
#if defined(__clang__)
        for (int64_t i = whole; i < n; i++) v[i - whole] = row[i];
#else
        if (n < L) {
            for (int64_t i = 0; i < n; i++) v[i] = row[i];
            return v;
        }
        v = __builtin_shuffle(load(row + n - L), from);
        v = inside ? v : Vec<T>{};
#endif
        return v;
    }
    MSLMN_INLINE void add_to(T* to, const T* row) const {
        for (int64_t i = 0; i < whole; i += L) store(to + i, load(to + i) + load(row + i));
        if (whole < n) store(to + whole, load(to + whole) + rest(row));
    }
};

// n values, no more: whole vectors, the last one ending where the values do
template <class T> MSLMN_INLINE void copy(T* to, const T* from, int64_t n) {
    constexpr int64_t L = LANES<T>;
    if (n < L) {
        for (int64_t i = 0; i < n; i++) to[i] = from[i];
        return;
    }
    for (int64_t i = 0; i + L <= n; i += L) store(to + i, load(from + i));
    store(to + n - L, load(from + n - L));
}
// whole vectors: n values, and to the end of the last vector
template <class T> MSLMN_INLINE void zero(T* to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES<T>) store(to + i, Vec<T>{});
}
template <class T> void copy_rows(T* to, int64_t ld, const T* from, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) copy(to + i * ld, from + i * columns, columns);
}

// to[j][i] = from[i][j]
template <class T> void transpose(T* to, int64_t ld, const T* from, int64_t rows, int64_t columns) {
    constexpr int64_t TILE = 16;
    for (int64_t i0 = 0; i0 < rows; i0 += TILE)
        for (int64_t j = 0; j < columns; j++)
            for (int64_t i = i0; i < std::min(i0 + TILE, rows); i++) to[j * ld + i] = from[i * columns + j];
}

// Whole vectors: what lies between n and the end of the last one is added too.
template <class T> MSLMN_INLINE void add(T* to, const T* what, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES<T>) store(to + i, load(to + i) + load(what + i));
}

// Where things lie in the state of one row: memories or their gradients, from 0, modules at multiples of Mp, a whole
// number of vectors; scratch; and z_1 .. z_{g+1}, dense, each with room behind it for a vector that starts inside.
template <class T> struct Layout {
    int64_t Ip, Hp, Mp, h, gh, x, gx, m, stride;
    std::vector<int64_t> z, ld;  // where z_j starts, and how many values its vectors take

    explicit Layout(const Problem& p) : Ip(padded<T>(p.I)), Hp(padded<T>(p.H)), Mp(padded<T>(p.M)) {
        h = p.g * Mp;
        gh = h + Hp;
        x = gh + Hp;
        gx = x + Ip;
        m = gx + Ip;
        int64_t end = m + Mp;
        for (int64_t j = 0; j <= p.g; j++) {
            z.push_back(end);
            ld.push_back(padded<T>(p.n(std::min(j, p.g - 1))));
            end += ld[j] + Hp + Mp;
        }
        stride = end;
    }
};

// Calls body(rows in the tile, first of them, modules that fire) for the rows of a block that have a step t, a tile
// being rows at the same point of their clocks.
template <class Body>
MSLMN_INLINE void for_tiles(const Problem& p, const int64_t* start, const int64_t* length, int64_t t, int64_t first,
                            int64_t end, Body body) {
    end = std::min(end, p.rows(t));
    auto fires = [&](int64_t b) {
        return active(start[b - first] + (p.reverse ? length[b - first] - t : t + 1), p.g);
    };
    for (int64_t b = first; b < end;) {
        const int64_t c = fires(b);
        int64_t same = 1;
        while (b + same < end && fires(b + same) == c) same++;
        body(same, b, c);
        b += same;
    }
}

template <class T> class ForwardPass {
    static constexpr int L = LANES<T>;
    const Problem& p;
    const Forward<T>& io;
    const Layout<T> at;
    Buffer<T> biases;            // z_{g+1}
    std::vector<Buffer<T>> U;    // U_j^T, (M, ld_j)
    std::vector<Buffer<T>> Wxh;  // Wxh^T, (I, Hp); Clockwork: g of (I, Mp)
    std::vector<Buffer<T>> Whm;  // Whm[k]^T, (H, Mp)

  public:
    ForwardPass(const Problem& p, const Forward<T>& io) : p(p), io(io), at(p), biases(at.ld[p.g] + at.Mp) {
        const Weights<const T> w(io.weights, p.g);
        if (p.H) {
            Wxh.emplace_back(p.I * at.Hp);
            transpose(Wxh[0].get(), at.Hp, w.Wxh, p.H, p.I);
            if (w.b_h) copy(biases.get(), w.b_h, p.H);
        }
        for (int64_t j = 0; j < p.g; j++) {
            U.emplace_back(p.M * at.ld[j]);
            if (p.H) transpose(U[j].get(), at.ld[j], w.Wmh[j], p.H, p.M);
            transpose(U[j].get() + p.H, at.ld[j], w.Wmm[j], (j + 1) * p.M, p.M);
            const int64_t K = p.H ? p.H : p.I;
            auto& in = p.H ? Whm : Wxh;
            in.emplace_back(K * at.Mp);
            transpose(in[j].get(), at.Mp, w.Whm[j], p.M, K);
            if (w.b_m[j]) copy(biases.get() + p.H + j * p.M, w.b_m[j], p.M);
        }
    }

    int64_t workspace() const { return TILE * at.stride; }

    void block(int64_t first, int64_t end, T* state) const {
        int64_t start[TILE], length[TILE];
        for (int64_t b = first; b < end; b++) {
            T* row = state + (b - first) * at.stride;
            start[b - first] = p.clock[b];
            length[b - first] = p.length(b);
            copy_rows(row, at.Mp, io.m0 + b * p.G(), p.g, p.M);
            copy(row + at.z[p.g], biases.get(), at.ld[p.g]);
        }
        send(end - first, state, p.g);
        for (int64_t s = 0; s < p.steps; s++) {
            const int64_t t = p.reverse ? p.steps - 1 - s : s;
            for_tiles(p, start, length, t, first, end, [&](int64_t n, int64_t b, int64_t c) {
                step(n, state + (b - first) * at.stride, p.first(t) + b, c);
            });
        }
        for (int64_t b = first; b < end; b++) write_memory(io.last + b * p.G(), state + (b - first) * at.stride);
    }

  private:
    // z_j = z_{j+1} + U_j m_j of the c fastest modules, slowest first
    void send(int64_t n, T* rows, int64_t c) const {
        for (int64_t j = c - 1; j >= 0; j--)
            product<T>(n, U[j].get(), at.ld[j], p.M, at.ld[j] / L, rows + j * at.Mp, rows + at.z[j + 1],
                       rows + at.z[j], at.stride);
    }

    void squash(int64_t n, T* rows, int64_t values) const {
        for (T* row = rows; row < rows + n * at.stride; row += at.stride)
            for (T* v = row; v < row + values; v += L) store(v, tanh_of<T>(load(v)));
    }

    void step(int64_t n, T* rows, int64_t index, int64_t c) const {
        T *x = rows + at.x, *h = rows + at.h;
        for (int64_t b = 0; b < n; b++) copy(x + b * at.stride, io.x + (index + b) * p.I, p.I);
        if (p.H) {
            product<T>(n, Wxh[0].get(), at.Hp, p.I, at.Hp / L, x, rows + at.z[0], h, at.stride);
            squash(n, h, at.Hp);
            if (io.hidden)
                for (int64_t b = 0; b < n; b++) copy(io.hidden + (index + b) * p.H, h + b * at.stride, p.H);
        }
        for (int64_t k = 0; k < c; k++) {
            T *m = rows + k * at.Mp, *z = rows + at.z[k] + p.H + k * p.M;
            if (p.H) {
                product<T>(n, Whm[k].get(), at.Mp, p.H, at.Mp / L, h, z, m, at.stride);
            } else {
                product<T>(n, Wxh[k].get(), at.Mp, p.I, at.Mp / L, x, z, m, at.stride);
                squash(n, m, at.Mp);
            }
        }
        for (int64_t b = 0; b < n; b++) write_memory(io.memory + (index + b) * p.G(), rows + b * at.stride);
        send(n, rows, c);
    }

    void write_memory(T* to, const T* row) const {
        if (at.Mp == p.M)
            copy(to, row, p.G());
        else
            for (int64_t k = 0; k < p.g; k++) copy(to + k * p.M, row + k * at.Mp, p.M);
    }
};

// A weight gradient, the sum of left right^T over steps and rows. Tiles of many rows are added at once; few rows are
// saved up, so that the sum is loaded and stored once for many.
template <class T> class OuterSum {
    int64_t rows, left_ld, ld, records = 0;
    Buffer<T> sum, left, right;  // (rows, ld), two vectors by two; (RECORDS, left_ld); (RECORDS, ld)

  public:
    OuterSum(int64_t rows, int64_t columns)
        : rows(rows), left_ld(padded<T>(rows)), ld(padded<T>(columns)), sum(rows * ld),
          left(RECORDS * left_ld, false), right(RECORDS * ld, false) {}

    void record(int64_t n, const T* l, const T* r, int64_t stride) {
        if (n >= WHOLE) return outer(sum.get(), rows, ld / LANES<T>, n, l, stride, r, stride);
        for (int64_t b = 0; b < n; b++) {
            if (records == RECORDS) flush();
            copy(left.get() + records * left_ld, l + b * stride, rows);
            copy(right.get() + records * ld, r + b * stride, ld);
            records++;
        }
    }

    void flush() {
        outer(sum.get(), rows, ld / LANES<T>, records, left.get(), left_ld, right.get(), ld);
        records = 0;
    }

    // These two after a flush. The second writes rows [from, from + n), as torch holds a (n, columns) matrix.
    void add(const OuterSum& other) { MSLMN_ISA::add(sum.get(), other.sum.get(), rows * ld); }
    void write(T* to, int64_t from, int64_t n, int64_t columns) const {
        constexpr int64_t PAIR = 2 * LANES<T>;
        for (int64_t c = 0; c < columns; c += PAIR) {
            const int64_t width = std::min(PAIR, ld - c);
            const T* pair = sum.get() + c * rows + from * width;
            for (int64_t i = 0; i < n; i++) copy(to + i * columns + c, pair + i * width, std::min(PAIR, columns - c));
        }
    }
};

// The weight gradients of a group of rows.
template <class T> struct Gradients {
    std::vector<OuterSum<T>> U, Wxh, Whm;
    int64_t size;  // of the biases
    Buffer<T> biases;

    Gradients(const Problem& p, const Layout<T>& at) : size(at.ld[p.g]), biases(size) {
        if (p.H) Wxh.emplace_back(p.H, p.I);
        for (int64_t j = 0; j < p.g; j++) {
            U.emplace_back(p.n(j), p.M);
            (p.H ? Whm : Wxh).emplace_back(p.M, p.H ? p.H : p.I);
        }
    }

    void flush() {
        for (auto* sums : {&U, &Wxh, &Whm})
            for (auto& sum : *sums) sum.flush();
    }

    // These two after a flush.
    void add(const Gradients& other) {
        for (std::size_t i = 0; i < U.size(); i++) U[i].add(other.U[i]);
        for (std::size_t i = 0; i < Wxh.size(); i++) Wxh[i].add(other.Wxh[i]);
        for (std::size_t i = 0; i < Whm.size(); i++) Whm[i].add(other.Whm[i]);
        MSLMN_ISA::add(biases.get(), other.biases.get(), size);
    }
    void write(const Problem& p, const Weights<T>& w) const {
        if (p.H) {
            Wxh[0].write(w.Wxh, 0, p.H, p.I);
            if (w.b_h) copy(w.b_h, biases.get(), p.H);
        }
        for (int64_t j = 0; j < p.g; j++) {
            if (p.H) U[j].write(w.Wmh[j], 0, p.H, p.M);
            U[j].write(w.Wmm[j], p.H, (j + 1) * p.M, p.M);
            (p.H ? Whm : Wxh)[j].write(w.Whm[j], 0, p.M, p.H ? p.H : p.I);
            if (w.b_m[j]) copy(w.b_m[j], biases.get() + p.H + j * p.M, p.M);
        }
    }
};

template <class T> class BackwardPass {
    static constexpr int L = LANES<T>;
    const Problem& p;
    const Backward<T>& io;
    const Layout<T> at;
    std::vector<Buffer<T>> U;    // U_j, (H + jM, Mp)
    std::vector<Buffer<T>> Wxh;  // (H, Ip); Clockwork: g of (M, Ip)
    std::vector<Buffer<T>> Whm;  // Whm[k], (M, Hp)
    const Rows<T> M_values;

  public:
    BackwardPass(const Problem& p, const Backward<T>& io)
        : p(p), io(io), at(p), M_values(p.M) {
        const Weights<const T> w(io.weights, p.g);
        if (p.H) {
            Wxh.emplace_back(p.H * at.Ip);
            copy_rows(Wxh[0].get(), at.Ip, w.Wxh, p.H, p.I);
        }
        for (int64_t j = 0; j < p.g; j++) {
            U.emplace_back(p.n(j) * at.Mp);
            if (p.H) copy_rows(U[j].get(), at.Mp, w.Wmh[j], p.H, p.M);
            copy_rows(U[j].get() + p.H * at.Mp, at.Mp, w.Wmm[j], (j + 1) * p.M, p.M);
            const int64_t ld = p.H ? at.Hp : at.Ip;
            auto& out = p.H ? Whm : Wxh;
            out.emplace_back(p.M * ld);
            copy_rows(out[j].get(), ld, w.Whm[j], p.M, p.H ? p.H : p.I);
        }
    }

    const Layout<T>& layout() const { return at; }
    int64_t workspace() const { return TILE * at.stride; }

    void block(int64_t first, int64_t end, T* state, Gradients<T>* gradients) const {
        int64_t start[TILE], length[TILE];
        zero(state, workspace());
        for (int64_t b = first; b < end; b++) {
            start[b - first] = p.clock[b];
            length[b - first] = p.length(b);
            if (io.glast) copy_rows(state + (b - first) * at.stride, at.Mp, io.glast + b * p.G(), p.g, p.M);
        }
        for (int64_t s = p.steps - 1; s >= 0; s--) {
            const int64_t t = p.reverse ? p.steps - 1 - s : s;
            for_tiles(p, start, length, t, first, end, [&](int64_t n, int64_t b, int64_t c) {
                step(n, state + (b - first) * at.stride, p.first(t) + b, c, gradients);
            });
        }
        receive(end - first, state, p.g, io.m0 + first * p.G(), gradients);
        for (int64_t b = first; b < end; b++) {
            T* row = state + (b - first) * at.stride;
            for (int64_t k = 0; k < p.g; k++) copy(io.gm0 + b * p.G() + k * p.M, row + k * at.Mp, p.M);
            if (gradients) add(gradients->biases.get(), row + at.z[p.g], p.n(p.g - 1));
        }
    }

  private:
    // gm_j += U_j^T gz_j;  gz_{j+1} += gz_j;  dU_j += gz_j m_j^T;  gz_j = 0, of the c fastest modules; m: the memories
    // of the rows after the step, as torch holds them
    void receive(int64_t n, T* rows, int64_t c, const T* m, Gradients<T>* gradients) const {
        for (int64_t j = 0; j < c; j++) {
            T *gm = rows + j * at.Mp, *gz = rows + at.z[j];
            product<T>(n, U[j].get(), at.Mp, p.n(j), at.Mp / L, gz, gm, gm, at.stride);
            if (gradients) {
                for (int64_t b = 0; b < n; b++) copy(rows + b * at.stride + at.m, m + b * p.G() + j * p.M, p.M);
                gradients->U[j].record(n, gz, rows + at.m, at.stride);
            }
            for (int64_t b = 0; b < n; b++) {
                add(rows + b * at.stride + at.z[j + 1], gz + b * at.stride, at.ld[j]);
                if (j > 0 || p.H == 0) zero(gz + b * at.stride, at.ld[j]);
            }
        }
    }

    void step(int64_t n, T* rows, int64_t index, int64_t c, Gradients<T>* gradients) const {
        if (io.gmemory)
            for (int64_t b = 0; b < n; b++)
                for (int64_t k = 0; k < p.g; k++)
                    M_values.add_to(rows + b * at.stride + k * at.Mp, io.gmemory + (index + b) * p.G() + k * p.M);
        receive(n, rows, c, io.memory + index * p.G(), gradients);
        for (int64_t b = 0; b < n; b++) {
            if (gradients) copy(rows + b * at.stride + at.x, io.x + (index + b) * p.I, p.I);
            if (io.gx) zero(rows + b * at.stride + at.gx, at.Ip);
        }
        if (p.H)
            through_hidden(n, rows, index, c, gradients);
        else
            through_modules(n, rows, index, c, gradients);
        if (io.gx)
            for (int64_t b = 0; b < n; b++) copy(io.gx + (index + b) * p.I, rows + b * at.stride + at.gx, p.I);
    }

    void through_hidden(int64_t n, T* rows, int64_t index, int64_t c, Gradients<T>* gradients) const {
        T *h = rows + at.h, *gh = rows + at.gh;
        for (int64_t b = 0; b < n; b++) {
            copy(h + b * at.stride, io.hidden + (index + b) * p.H, p.H);
            if (io.ghidden)
                copy(gh + b * at.stride, io.ghidden + (index + b) * p.H, p.H);
            else
                zero(gh + b * at.stride, at.Hp);
        }
        for (int64_t k = 0; k < c; k++) {
            T* gm = rows + k * at.Mp;
            product<T>(n, Whm[k].get(), at.Hp, p.M, at.Hp / L, gm, gh, gh, at.stride);
            if (gradients) gradients->Whm[k].record(n, gm, h, at.stride);
        }
        for (int64_t b = 0; b < n; b++) {
            T *row = rows + b * at.stride, *hb = h + b * at.stride, *ga = gh + b * at.stride;
            for (int64_t i = 0; i < at.Hp; i += L) {
                const Vec<T> v = load(ga + i) * (T(1) - load(hb + i) * load(hb + i));
                store(ga + i, v);
                store(row + at.z[0] + i, v);  // module 0 always fires: gz_0 is nothing but ga and gm_0
            }
            for (int64_t k = 0; k < c; k++) {
                T *gm = row + k * at.Mp, *gz = row + at.z[k] + p.H + k * p.M;
                for (int64_t i = 0; i < at.Mp; i += L) {
                    store(gz + i, k == 0 ? load(gm + i) : load(gz + i) + load(gm + i));
                    store(gm + i, Vec<T>{});
                }
            }
        }
        from_input(n, rows, gh, p.H, Wxh[0], gradients ? &gradients->Wxh[0] : nullptr);
    }

    void through_modules(int64_t n, T* rows, int64_t index, int64_t c, Gradients<T>* gradients) const {
        for (int64_t k = 0; k < c; k++) {
            T* ga = rows + k * at.Mp;
            for (int64_t b = 0; b < n; b++) {
                T* gb = ga + b * at.stride;
                const T* m = io.memory + (index + b) * p.G() + k * p.M;
                for (int64_t i = 0; i < p.M; i++) gb[i] *= T(1) - m[i] * m[i];
                add(rows + b * at.stride + at.z[k] + k * p.M, gb, at.Mp);
            }
            from_input(n, rows, ga, p.M, Wxh[k], gradients ? &gradients->Wxh[k] : nullptr);
            for (int64_t b = 0; b < n; b++) zero(ga + b * at.stride, at.Mp);
        }
    }

    // gx += Wxh^T ga;  dWxh += ga x^T
    void from_input(int64_t n, T* rows, const T* ga, int64_t K, const Buffer<T>& W, OuterSum<T>* gradient) const {
        T* gx = rows + at.gx;
        if (io.gx) product<T>(n, W.get(), at.Ip, K, at.Ip / L, ga, gx, gx, at.stride);
        if (gradient && p.I) gradient->record(n, ga, rows + at.x, at.stride);
    }
};

template <class T> void forward(const Problem& p, const Forward<T>& io) {
    const ForwardPass<T> pass(p, io);
    const int64_t blocks = p.blocks(), threads = useful_threads(p, blocks, 1);
    std::vector<Buffer<T>> states;
    for (int64_t i = 0; i < threads; i++) states.emplace_back(pass.workspace());
    parallel(blocks, threads, [&](int64_t i, int64_t thread) {
        pass.block(p.begin(i), p.begin(i + 1), states[thread].get());
    });
}

template <class T> void backward(const Problem& p, const Backward<T>& io) {
    const BackwardPass<T> pass(p, io);
    const int64_t blocks = p.blocks();
    const int64_t groups = std::max<int64_t>(1, std::min(blocks, GROUPS));  // one, of zeros, for an empty batch
    const int64_t threads = useful_threads(p, groups, 2);
    std::vector<Buffer<T>> states;
    std::vector<Gradients<T>> gradients;
    for (int64_t i = 0; i < threads; i++) states.emplace_back(pass.workspace());
    for (int64_t i = 0; i < groups && io.gweights; i++) gradients.emplace_back(p, pass.layout());
    parallel(groups, threads, [&](int64_t i, int64_t thread) {
        for (int64_t block = i * blocks / groups; block < (i + 1) * blocks / groups; block++)
            pass.block(p.begin(block), p.begin(block + 1), states[thread].get(),
                       io.gweights ? &gradients[i] : nullptr);
        if (io.gweights) gradients[i].flush();
    });
    if (io.gweights) {
        for (int64_t i = 1; i < groups; i++) gradients[0].add(gradients[i]);
        gradients[0].write(p, Weights<T>(places(p, io.weights, io.gweights).data(), p.g));
    }
}

#undef MSLMN_INLINE

}  // namespace MSLMN_ISA
}  // namespace

#endif
