// Connectionist temporal classification on CUDA devices: the loss of a packed batch of logits and its gradient, compiled
// at run time (ops/ctc.py).
//
//     emit     log-softmax of each row: a warp takes a row and leaves the probabilities of its sequence's labels
//     sweep    alpha and beta, each in a block of its own: what counts is how long a step takes, T of them one after the
//              other
//     finish   softmax minus posteriors, a warp a row, and the sum of the losses
//
// A sequence of L labels has L + 1 pairs of states: a blank, and the label behind it (the last pair has none). A thread
// has PAIRS of them in registers, and a step needs one value of the thread before, the last label:
//
//     blank_i = (blank_i + label_{i-1}) p_blank      label_i = (label_i + blank_i + label_{i-1}) p_i
//
// without the last term where both labels are the same. beta is alpha of the sequence and its labels turned round.
//
// States are numbers m 2^e: probabilities of long sequences are out of the range of floats, and not all by the same
// factor, while their logarithms, in the thousands, would have few digits left behind the point. And nothing in the chain
// of a step is slower than a multiplication. Posteriors are divided by their sum at each step, which takes out what alpha
// and beta have in common of rounding errors. Sums have a fixed order: the same bits every time.
//
// The constants PAIRS, WARPS (of a sweep), AHEAD, ROWS (warps of `finish`) and the type real are defined by ops/ctc.py in
// front of this text.

typedef long long int64;

#ifndef MSLMN_EMULATED  // the tests run this file on the CPU, with these few names for threads in turn

#define INLINE __device__ __forceinline__
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#define UNROLL _Pragma("unroll")

INLINE int thread() { return threadIdx.x; }
INLINE int block() { return blockIdx.x; }
INLINE int column() { return blockIdx.y; }
INLINE void barrier(int threads) { __syncthreads(); }
INLINE void warp_barrier() { __syncwarp(); }
INLINE char* shared_memory() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}
template <class T> INLINE T shuffle(T v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
template <class T> INLINE T shuffle_up(T v) { return __shfl_up_sync(0xffffffffu, v, 1); }
INLINE int bits(float v) { return __float_as_int(v); }
INLINE int64 bits(double v) { return __double_as_longlong(v); }
INLINE float from_bits(int v) { return __int_as_float(v); }
INLINE double from_bits(int64 v) { return __longlong_as_double(v); }

#endif

INLINE float exp_of(float v) { return expf(v); }
INLINE double exp_of(double v) { return exp(v); }
INLINE float log_of(float v) { return logf(v); }
INLINE double log_of(double v) { return log(v); }
INLINE float whole_of(float v) { return rintf(v); }
INLINE double whole_of(double v) { return rint(v); }
INLINE int larger(int a, int b) { return a > b ? a : b; }
INLINE real larger(real a, real b) { return a > b ? a : b; }

// How a real is made of bits, and ln 2 as a sum whose first term has few of them.
template <class T> struct Format;
template <> struct Format<float> {
    typedef int Bits;
    static constexpr int digits = 23, bias = 127;
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};
template <> struct Format<double> {
    typedef int64 Bits;
    static constexpr int digits = 52, bias = 1023;
    static constexpr double ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
};
typedef Format<real> Of;
typedef Of::Bits Bits;

// m 2^e. Zero has a low e, and is any number whose e would be lower.
struct alignas(2 * sizeof(real)) Scaled {
    real m;
    int e;
};
struct alignas(16) Pair { Scaled blank, label; };
constexpr int LOWEST = -(1 << 29);
constexpr int FAINTEST = -(1 << 24);  // of a step
constexpr int BARRED = -(1 << 30);    // added to the e of what must not be added
constexpr int EVERY = 4;              // steps after which m is between 1 and 2 again: until then it stays below 1000

INLINE real power(int e) {  // 2^e, e <= 0
    return from_bits(static_cast<Bits>(larger(e + Of::bias, 0)) << Of::digits);
}
INLINE Scaled sum(Scaled a, Scaled b) {
    const int e = larger(a.e, b.e);
    return {a.m * power(a.e - e) + b.m * power(b.e - e), e};
}
INLINE Scaled sum(Scaled a, Scaled b, Scaled c) {
    const int e = larger(larger(a.e, b.e), c.e);
    return {a.m * power(a.e - e) + b.m * power(b.e - e) + c.m * power(c.e - e), e};
}
INLINE Scaled product(Scaled a, Scaled b) { return {a.m * b.m, a.e + b.e}; }
INLINE Scaled normal(Scaled a) {  // zeros and NaN stay what they are
    const Bits all = bits(a.m);
    const int e = a.e + static_cast<int>(all >> Of::digits) - Of::bias;
    if (!(a.m > 0)) return {a.m, LOWEST};
    if (e < LOWEST) return {0, LOWEST};
    const Bits one = static_cast<Bits>(Of::bias) << Of::digits;
    return {from_bits((all & ((static_cast<Bits>(1) << Of::digits) - 1)) | one), e};
}
INLINE Scaled exponential(real v) {  // of v <= 0, or NaN
    if (v <= FAINTEST * real(0.69)) return {0, FAINTEST};
    const real e = v == v ? whole_of(v * real(1.44269504088896340736)) : real(0);
    return {exp_of((v - e * Of::ln2_high) - e * Of::ln2_low), static_cast<int>(e)};
}
INLINE real logarithm(Scaled a) {
    return (log_of(a.m) + a.e * Of::ln2_low) + a.e * Of::ln2_high;
}

INLINE real warp_sum(real v) {
    UNROLL for (int mask = 16; mask; mask /= 2) v += shuffle(v, mask);
    return v;
}

// A packed batch, sequences longest first: where the rows of each step begin (T), lengths (B), where the labels of each
// sequence begin (B + 1), where its pairs do (B), labels. A sequence has L + 1 pairs at every step, one step after the
// other.
struct Batch {
    const int64* data;
    int64 T, B, O;

    INLINE int length(int b) const { return static_cast<int>(data[T + b]); }
    INLINE int64 row(int t, int b) const { return data[t] + b; }
    INLINE int64 label_at(int b) const { return data[T + B + b]; }
    INLINE int labels(int b) const { return static_cast<int>(label_at(b + 1) - label_at(b)); }
    INLINE int64 pair_at(int b) const { return data[T + 2 * B + 1 + b]; }
    INLINE const int64* label(int b) const { return data + T + 3 * B + 1 + label_at(b); }
};
constexpr int STEPS = 16;  // of one sequence, that a block of `emit` or `finish` takes

struct Emit {
    Batch batch;
    const real* logits;  // N x O
    real* lse;           // N
    Scaled* emitted;     // of each pair: at 0 the blank's probability, at i that of label i - 1
    int* links;          // of each label: where the next of its kind is (L: nowhere), ~ that if one was before it
};

KERNEL(256) emit(const Emit a) {
    const int b = block(), lane = thread() % 32, length = a.batch.length(b), L = a.batch.labels(b);
    const int64* const labels = a.batch.label(b);
    const int end = column() * STEPS + STEPS < length ? column() * STEPS + STEPS : length;
    for (int t = column() * STEPS + thread() / 32; t < end; t += 8) {
        const int64 at = a.batch.row(t, b);
        const real* const row = a.logits + at * a.batch.O;
        real most = lane < a.batch.O ? row[lane] : row[0];
        for (int k = lane + 32; k < a.batch.O; k += 32) most = larger(row[k], most);
        UNROLL for (int mask = 16; mask; mask /= 2) most = larger(shuffle(most, mask), most);
        real sum = 0;
        for (int k = lane; k < a.batch.O; k += 32) sum += exp_of(row[k] - most);
        const real lse = most + log_of(warp_sum(sum));
        if (lane == 0) a.lse[at] = lse;
        Scaled* const emitted = a.emitted + a.batch.pair_at(b) + static_cast<int64>(t) * (L + 1);
        for (int i = lane; i <= L; i += 32) emitted[i] = exponential(row[i ? labels[i - 1] : 0] - lse);
    }
    if (column() == 0 && a.links)
        for (int i = thread(); i < L; i += 256) {
            int next = i + 1, before = i - 1;
            while (next < L && labels[next] != labels[i]) next++;
            while (before >= 0 && labels[before] != labels[i]) before--;
            a.links[a.batch.label_at(b) + i] = before < 0 ? next : ~next;
        }
}

struct Sweep {
    Batch batch;
    const Scaled* emitted;
    Pair *alpha, *beta;  // null: not wanted. alpha with the probability of its own step, beta without, and turned round
    Scaled* totals;      // B: the probability of the labels
};

// What the last thread of each warp says to the first of the next, at even steps and at odd ones.
INLINE Scaled from_before(Scaled mine, int s) {
    Scaled found = {shuffle_up(mine.m), shuffle_up(mine.e)};
    if (WARPS > 1) {
        Scaled* const said = reinterpret_cast<Scaled*>(shared_memory()) + (s & 1) * WARPS;
        const int warp = thread() / 32, lane = thread() % 32;
        if (lane == 31) said[warp] = mine;
        barrier(32 * WARPS);
        if (lane == 0 && warp > 0) found = said[warp - 1];
    }
    if (thread() == 0) found = {0, LOWEST};
    return found;
}

KERNEL(32 * WARPS) sweep(const Sweep a) {
    const int b = block(), turned = column(), length = a.batch.length(b), L = a.batch.labels(b);
    const int64* const labels = a.batch.label(b);
    const int first = thread() * PAIRS;
    const int64 pitch = turned ? -(L + 1) : L + 1, begin = a.batch.pair_at(b) + (turned ? (length - 1) * (L + 1ll) : 0);
    const Scaled* const emitted = a.emitted + begin;
    Pair* const kept = (turned ? a.beta : a.alpha) + begin;
    const bool keeps = a.alpha != nullptr;

    Scaled blank[PAIRS], label[PAIRS];
    int where[PAIRS], barred[PAIRS];
    UNROLL for (int k = 0; k < PAIRS; k++) {
        const int i = first + k, at = turned ? L - 1 - i : i;  // which label
        where[k] = i < L ? at + 1 : 0;
        barred[k] = i > 0 && i < L && labels[at] != labels[turned ? at + 1 : at - 1] ? 0 : BARRED;
        blank[k] = label[k] = {0, LOWEST};
    }
    if (thread() == 0) blank[0] = {1, 0};  // before the first step

    struct Emission { Scaled blank, label[PAIRS]; };
    auto fetched = [&](int s) {
        const Scaled* const row = emitted + pitch * (s < length ? s : length - 1);
        Emission found;
        found.blank = row[0];
        UNROLL for (int k = 0; k < PAIRS; k++) found.label[k] = row[where[k]];
        return found;
    };
    auto step = [&](const Emission& now, int s, bool normalise) {
        Scaled before = from_before(label[PAIRS - 1], s);
        UNROLL for (int k = PAIRS - 1; k >= 0; k--) {
            const Scaled last = k ? label[larger(k, 1) - 1] : before;
            const Pair sums = {sum(blank[k], last), sum(label[k], blank[k], {last.m, last.e + barred[k]})};
            blank[k] = product(sums.blank, now.blank);
            label[k] = product(sums.label, now.label[k]);
            if (keeps && first + k <= L) kept[pitch * s + first + k] = turned ? sums : Pair{blank[k], label[k]};
            if (normalise) blank[k] = normal(blank[k]), label[k] = normal(label[k]);
        }
    };

    Emission ring[AHEAD];
    UNROLL for (int i = 0; i < AHEAD; i++) ring[i] = fetched(i);
    int s = 0;
    for (; s + AHEAD <= length; s += AHEAD)
        UNROLL for (int i = 0; i < AHEAD; i++) {
            step(ring[i], s + i, i % EVERY == EVERY - 1 || i == AHEAD - 1);
            ring[i] = fetched(s + i + AHEAD);
        }
    UNROLL for (int i = 0; i < AHEAD - 1; i++)
        if (s + i < length) step(ring[i], s + i, i % EVERY == EVERY - 1);
    const Scaled before = from_before(label[PAIRS - 1], length);
    UNROLL for (int k = 0; k < PAIRS; k++)
        if (!turned && first + k == L) a.totals[b] = normal(sum(blank[k], k ? label[larger(k, 1) - 1] : before));
}

struct Finish {
    Batch batch;
    const real *logits, *lse;
    const Pair *alpha, *beta;
    const Scaled* totals;
    const int* links;
    real *gradient, *loss, *items;  // N x O, or null: not wanted; the losses' sum; their number
};

KERNEL(32 * ROWS) finish(const Finish a) {
    const int b = block(), lane = thread() % 32, warp = thread() / 32;
    if (a.gradient) {
        const int length = a.batch.length(b), L = a.batch.labels(b), O = static_cast<int>(a.batch.O);
        const int64* const labels = a.batch.label(b);
        const int* const links = a.links + a.batch.label_at(b);
        const Scaled total = a.totals[b];
        const real inverse = 1 / total.m;
        auto posterior = [&](Scaled alpha, Scaled beta) {
            return alpha.m * beta.m * inverse * power(alpha.e + beta.e - total.e);
        };
        real* const posteriors = reinterpret_cast<real*>(shared_memory()) + warp * (32 * WARPS * PAIRS);
        const int end = column() * STEPS + STEPS < length ? column() * STEPS + STEPS : length;
        for (int t = column() * STEPS + warp; t < end; t += ROWS) {
            const int64 at = a.batch.row(t, b);
            const real* const row = a.logits + at * O;
            real* const gradient = a.gradient + at * O;
            if (total.m == 0) {  // too short for its labels
                for (int k = lane; k < O; k += 32) gradient[k] = 0;
                continue;
            }
            const int64 begin = a.batch.pair_at(b) + static_cast<int64>(t) * (L + 1);
            const Pair *const alpha = a.alpha + begin, *const beta = a.beta + begin;
            real blanks = 0, others = 0;
            for (int i = lane; i <= L; i += 32) {
                const Pair both = alpha[i];
                blanks += posterior(both.blank, beta[L - i].blank);
                if (i < L) others += posteriors[i] = posterior(both.label, beta[L - 1 - i].label);
            }
            const real lse = a.lse[at];
            for (int k = lane; k < O; k += 32) gradient[k] = exp_of(row[k] - lse);
            blanks = warp_sum(blanks), others = warp_sum(others);
            const real share = 1 / (blanks + others);
            warp_barrier();  // what follows takes the place of some of it
            if (lane == 0) gradient[0] = exp_of(row[0] - lse) - blanks * share;
            for (int i = lane; i < L; i += 32) {
                int next = links[i];
                if (next < 0) continue;
                real sum = posteriors[i];
                while (next < L) {
                    sum += posteriors[next];
                    next = ~links[next];
                }
                gradient[labels[i]] = exp_of(row[labels[i]] - lse) - sum * share;
            }
            warp_barrier();
        }
    }
    if (b || column() || warp) return;
    real sum = 0;
    for (int64 i = lane; i < a.batch.B; i += 32)
        if (!(a.totals[i].m == 0)) sum -= logarithm(a.totals[i]);
    sum = warp_sum(sum);
    if (lane == 0) *a.loss = sum, *a.items = static_cast<real>(a.batch.B);
}
