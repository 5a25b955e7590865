// Runs the kernels of cuda.cu and ctc.cu on the CPU, one block after the other, as hostile a device as the language
// allows: threads go on in random order between barriers, warps rest while others run ahead, copies arrive at any moment
// between their start and the wait for them, shared memory holds NaN at first and ends at a page that must not be touched.
// A kernel whose result depends on any of this is wrong.

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define MSLMN_EMULATED
#define INLINE inline
#define KERNEL(...) static void
#define UNROLL
#define UNROLL_BY(n)
#define CONSTANT static constexpr

namespace emulator {

enum State { RUNS, AT_BARRIER, AT_SHUFFLE, DONE };

struct Copy {
    unsigned* to;
    const unsigned* from;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    State state = RUNS;
    double given = 0, shuffled = 0;  // to the others of the warp, and by them
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
    static constexpr std::size_t STACK = 256 << 10;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline int current, x, y;
inline char* memory;
inline std::mt19937 chance;
inline std::function<void()> kernel;

inline void pause(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}
inline void finish(std::vector<Copy>& copies) {
    for (auto& copy : copies) *copy.to = *copy.from;
    copies.clear();
}
inline void begin() {
    kernel();
    pause(DONE);
}

inline bool run_block(int threads) {  // false: some wait for others who never come
    fibers = std::vector<Fiber>(threads);
    for (auto& fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = Fiber::STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, begin, 0);
    }
    std::vector<int> ready;
    int resting = 0;  // a warp that others leave behind
    while (true) {
        ready.clear();
        if (chance() % 8 == 0) resting = static_cast<int>(chance() % (threads / 32 + 1)) * 32;
        int done = 0, waiting = 0;
        bool runs = false;
        for (int warp = 0; warp < threads; warp += 32) {
            int shuffling = 0;
            for (int i = warp; i < warp + 32; i++) {
                const State state = fibers[i].state;
                done += state == DONE, waiting += state == AT_BARRIER, shuffling += state == AT_SHUFFLE;
                runs = runs || state == RUNS;
                if (state == RUNS && warp != resting) ready.push_back(i);
            }
            if (shuffling < 32) continue;
            runs = true;
            for (int i = warp; i < warp + 32; i++) fibers[i].shuffled = fibers[i].given, fibers[i].state = RUNS;
        }
        if (!runs) {
            if (done == threads) return true;
            if (waiting < threads) return false;  // the others left, or wait for each other
            for (auto& fiber : fibers) fiber.state = RUNS;
            continue;
        }
        std::shuffle(ready.begin(), ready.end(), chance);
        for (int i : ready) {
            current = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
    }
}

inline int launch(std::function<void()> what, int blocks, int columns, int threads, int bytes, unsigned seed) {
    chance.seed(seed);
    kernel = what;
    const std::size_t page = sysconf(_SC_PAGESIZE), size = (bytes + page - 1) / page * page;
    char* const all = static_cast<char*>(mmap(0, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (all == MAP_FAILED || mprotect(all + size, page, PROT_NONE)) return 2;
    memory = all + size - (bytes + 15) / 16 * 16;
    bool ok = true;
    for (y = 0; y < columns && ok; y++)
        for (x = 0; x < blocks && ok; x++) {
            for (std::size_t i = 0; i < size / 4; i++)  // no number, and as an index far outside
                reinterpret_cast<unsigned*>(all)[i] = 0x7fffffffu;
            ok = run_block(threads);
        }
    munmap(all, size + page);
    return ok ? 0 : 1;
}

}  // namespace emulator

inline int thread() { return emulator::current; }
inline int block() { return emulator::x; }
inline int column() { return emulator::y; }
inline void barrier(int) { emulator::pause(emulator::AT_BARRIER); }
inline char* shared_memory() { return emulator::memory; }
template <class T> T shuffle(T v, int mask) {
    emulator::fibers[emulator::current].given = v;
    emulator::pause(emulator::AT_SHUFFLE);
    return static_cast<T>(emulator::fibers[emulator::current ^ mask].shuffled);
}
template <class T> T shuffle_up(T v) {
    const int me = emulator::current;
    emulator::fibers[me].given = v;
    emulator::pause(emulator::AT_SHUFFLE);
    return static_cast<T>(emulator::fibers[me % 32 ? me - 1 : me].shuffled);
}
inline void warp_barrier() { emulator::pause(emulator::AT_SHUFFLE); }
template <class To, class From> To bits_of(From v) {
    To found;
    std::memcpy(&found, &v, sizeof(To));
    return found;
}
inline int bits(float v) { return bits_of<int>(v); }
inline long long bits(double v) { return bits_of<long long>(v); }
inline float from_bits(int v) { return bits_of<float>(v); }
inline double from_bits(long long v) { return bits_of<double>(v); }
inline int uniform(int v) { return v; }
template <class T> T opaque(T v) { return v; }
template <class T> T* advanced(T* p, int n, int pitch) { return p + static_cast<long long>(n) * pitch; }
inline int zeros_at_the_end(long long t) { return __builtin_ffsll(t) - 1; }
inline void copy_async(unsigned* to, const unsigned* from) {
    emulator::Fiber& me = emulator::fibers[emulator::current];
    *to = 0xffffffffu;  // neither what was there nor what will be
    if (emulator::chance() % 2) *to = *from; else me.open.push_back({to, from});
}
template <class T> void copy_async(T* to, const T* from) {
    for (int i = 0; i < 4; i++) copy_async(to->words + i, from->words + i);
}
inline void commit() {
    emulator::Fiber& me = emulator::fibers[emulator::current];
    me.groups.push_back(std::move(me.open));
    me.open.clear();
}
template <int pending> void wait() {
    emulator::Fiber& me = emulator::fibers[emulator::current];
    while (static_cast<int>(me.groups.size()) > pending) {
        emulator::finish(me.groups.front());
        me.groups.pop_front();
    }
}

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
inline float widen(float16 v) {
    _Float16 h;
    std::memcpy(&h, &v, 2);
    return h;
}
inline float widen(bfloat16 v) {
    const std::uint32_t bits = std::uint32_t(v.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline void put(float16* to, float v) {
    const _Float16 h = v;
    std::memcpy(to, &h, 2);
}
inline void put(bfloat16* to, float v) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    to->bits = static_cast<unsigned short>(v != v ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float tanh_of(float v) { return std::tanh(v); }
inline double tanh_of(double v) { return std::tanh(v); }
