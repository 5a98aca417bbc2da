// Metal's words for a host C++ compiler, as far as our kernels use them.
//
// A threadgroup runs on one thread of the host: each of its threads is a strand that runs until it
// meets an operation of its SIMD group or a barrier, where it waits for the others. Whoever waits
// for a thread that has returned, or that waits for something else, ends the program with a line
// that says so. Three orders show what a missing barrier does: threads first to last and last to
// first, their writes to threadgroup memory seen at once, and first to last with writes that others
// see from the next barrier on and no earlier.
//
// Buffers lie between guards, indices of arguments are checked, and memory that nobody wrote is NaN
// or -1. What this does not have: Metal's own rounding of `exp` and the like.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>
#if defined(__GLIBC__) && !defined(STRANDS_ARE_THREADS)
#include <ucontext.h>
#else
#include <condition_variable>
#include <mutex>
#include <thread>
#endif

namespace host {

[[noreturn]] inline void fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::_Exit(3);
}

#if defined(__GLIBC__) && !defined(STRANDS_ARE_THREADS)
// A stack of its own on the same thread.
class Strand {
 public:
  explicit Strand(std::function<void()> work) : work_(std::move(work)) {
    // Stacks are used again, and never filled: most of their pages stay untouched.
    if (free_stacks().empty()) free_stacks().emplace_back(new char[size]);
    stack_ = std::move(free_stacks().back());
    free_stacks().pop_back();
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = size;
    own_.uc_link = &back_;
    const auto at = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&own_, reinterpret_cast<void (*)()>(enter), 2, unsigned(at >> 32), unsigned(at));
  }
  ~Strand() { free_stacks().push_back(std::move(stack_)); }
  void resume() { swapcontext(&back_, &own_); }
  void pause() { swapcontext(&own_, &back_); }

 private:
  static void enter(unsigned high, unsigned low) {
    reinterpret_cast<Strand*>((std::uintptr_t(high) << 32) | low)->work_();
  }
  static std::vector<std::unique_ptr<char[]>>& free_stacks() {
    static std::vector<std::unique_ptr<char[]>> all;
    return all;
  }
  static constexpr std::size_t size = 64 * 1024;
  std::function<void()> work_;
  std::unique_ptr<char[]> stack_;
  ucontext_t own_, back_;
};
#else
// A thread of the host that runs only while whoever resumed it waits.
class Strand {
 public:
  explicit Strand(std::function<void()> work) : own_([this, work] {
    wait(true);
    work();
    pass(false);
  }) {}
  ~Strand() { own_.join(); }
  void resume() {
    pass(true);
    wait(false);
  }
  void pause() {
    pass(false);
    wait(true);
  }

 private:
  void pass(bool to_it) {
    std::lock_guard<std::mutex> held(lock_);
    its_turn_ = to_it;
    turn_.notify_all();
  }
  void wait(bool for_it) {
    std::unique_lock<std::mutex> held(lock_);
    turn_.wait(held, [&] { return its_turn_ == for_it; });
  }
  std::mutex lock_;
  std::condition_variable turn_;
  bool its_turn_ = false;
  std::thread own_;
};
#endif

enum class Order { forward, backward, late };
enum class At { ready, simd, barrier, returned };

struct Lane {
  std::unique_ptr<Strand> strand;
  At at = At::ready;
  const char* op = "";
  int line = 0;
  bool orders_memory = false;
  std::uint32_t value = 0;
  std::vector<char> memory; // threadgroup memory as this thread sees it, if writes are seen late
};

// The threads of a threadgroup; 32 in a row are a SIMD group.
class Group {
 public:
  Group(int threads, Order order, char* shared, std::size_t bytes)
      : lanes_(threads), seen_(threads), order_(order), shared_(shared), bytes_(bytes) {}

  template <typename Work>
  void run(Work work) {
    std::memset(shared_, 0xff, bytes_);
    memory_.assign(shared_, shared_ + bytes_);
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      Lane& lane = lanes_[i];
      if (order_ == Order::late) lane.memory = memory_;
      lane.strand = std::make_unique<Strand>([this, i, work] {
        work(int(i));
        lanes_[i].at = At::returned;
      });
    }
    while (!all(0, lanes_.size(), At::returned)) {
      const std::size_t groups = lanes_.size() / 32;
      for (std::size_t g = 0; g < groups; ++g) {
        run_simdgroup(order_ == Order::backward ? groups - 1 - g : g);
      }
      if (all(0, lanes_.size(), At::barrier)) {
        release_barrier();
      } else if (!all(0, lanes_.size(), At::returned)) {
        fail("threads wait for each other: " + places());
      }
    }
    lanes_.clear();
  }

  Lane& lane() { return lanes_[current_]; }
  const std::uint32_t* seen() const { return &seen_[current_ / 32 * 32]; }
  int index_in_simdgroup() const { return int(current_ % 32); }

  void wait(At at, const char* op, int line) {
    Lane& me = lane();
    me.at = at;
    me.op = op;
    me.line = line;
    me.strand->pause();
  }

 private:
  bool all(std::size_t from, std::size_t to, At at) const {
    for (std::size_t i = from; i < to; ++i) {
      if (lanes_[i].at != at) return false;
    }
    return true;
  }

  // Goes on until its threads wait for other SIMD groups, or have returned.
  void run_simdgroup(std::size_t g) {
    const std::size_t from = g * 32, to = from + 32;
    for (bool again = true; again;) {
      for (std::size_t n = 0; n < 32; ++n) {
        const std::size_t i = order_ == Order::backward ? to - 1 - n : from + n;
        if (lanes_[i].at == At::ready) step(i);
      }
      again = all(from, to, At::simd);
      for (std::size_t i = from; again && i < to; ++i) {
        if (std::strcmp(lanes_[i].op, lanes_[from].op) != 0 || lanes_[i].line != lanes_[from].line) {
          fail("a SIMD group diverges: " + places());
        }
      }
      for (std::size_t i = from; again && i < to; ++i) {
        seen_[i] = lanes_[i].value;
        lanes_[i].at = At::ready;
      }
    }
  }

  void step(std::size_t i) {
    current_ = i;
    if (order_ == Order::late) std::memcpy(shared_, lanes_[i].memory.data(), bytes_);
    lanes_[i].strand->resume();
    if (order_ == Order::late) std::memcpy(lanes_[i].memory.data(), shared_, bytes_);
  }

  void release_barrier() {
    bool orders_memory = true;
    for (Lane& lane : lanes_) orders_memory = orders_memory && lane.orders_memory;
    if (order_ == Order::late && orders_memory) {
      std::vector<char> next = memory_;
      for (const Lane& lane : lanes_) {
        for (std::size_t b = 0; b < bytes_; ++b) {
          if (lane.memory[b] != memory_[b]) next[b] = lane.memory[b];
        }
      }
      memory_ = next;
      for (Lane& lane : lanes_) lane.memory = memory_;
    }
    for (Lane& lane : lanes_) lane.at = At::ready;
  }

  std::string places() const {
    std::string text;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      const Lane& lane = lanes_[i];
      const std::string place = lane.at == At::returned ? "has returned"
          : std::string("is at ") + lane.op + " in line " + std::to_string(lane.line);
      if (text.find(place) == std::string::npos) text += "thread " + std::to_string(i) + " " + place + "; ";
    }
    return text;
  }

  std::vector<Lane> lanes_;
  std::vector<std::uint32_t> seen_;
  std::size_t current_ = 0;
  Order order_;
  char* shared_;
  std::size_t bytes_;
  std::vector<char> memory_;
};

inline Group*& group() {
  static Group* one = nullptr;
  return one;
}

template <typename To, typename From>
To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable<To>::value, "as many bits");
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

// Every thread of the SIMD group gives a value, and gets the fold of all.
template <typename T, typename Fold>
T across(const char* op, int line, T value, Fold fold) {
  group()->lane().value = same_bits<std::uint32_t>(value);
  group()->wait(At::simd, op, line);
  T all[32], next[32];
  for (int i = 0; i < 32; ++i) all[i] = same_bits<T>(group()->seen()[i]);
  for (int s = 16; s > 0; s /= 2) {
    for (int i = 0; i < 32; ++i) next[i] = fold(all[i], all[i ^ s]);
    std::memcpy(all, next, sizeof all);
  }
  return all[group()->index_in_simdgroup()];
}

// A buffer between guards.
class Buffer {
 public:
  Buffer(const char* name, std::size_t element, long count)
      : name_(name), guard_(256 * element), bytes_(element * count), all_(2 * guard_ + bytes_, char(0xff)) {}
  char* data() { return all_.data() + guard_; }
  void read() {
    if (std::fread(data(), 1, bytes_, stdin) != bytes_) fail(std::string("too few bytes for ") + name_);
  }
  void write() {
    for (std::size_t i = 0; i < guard_; ++i) {
      if (all_[i] != char(0xff) || all_[guard_ + bytes_ + i] != char(0xff)) {
        fail(std::string("something was written beside ") + name_);
      }
    }
    if (std::fwrite(data(), 1, bytes_, stdout) != bytes_) fail("standard output is closed");
  }

 private:
  const char* name_;
  std::size_t guard_, bytes_;
  std::vector<char> all_;
};

// A pointer argument. Metal has two address spaces for them, which do not mix: a pointer into the
// constant one becomes no other pointer.
template <typename T>
struct ConstantPointer {
  T* first;
  long count;
  const char* name;
  template <typename Index>
  T& operator[](Index i) const {
    const long long at = static_cast<long long>(i);
    if (at < 0 || at >= count) {
      fail(std::string(name) + "[" + std::to_string(at) + "] of " + std::to_string(count) + " elements");
    }
    return first[at];
  }
};

template <typename T>
struct DevicePointer : ConstantPointer<T> {
  DevicePointer(T* first, long count, const char* name) : ConstantPointer<T>{first, count, name} {}
  operator T*() const { return this->first; }
  explicit operator typename std::conditional<std::is_const<T>::value, typename std::remove_const<T>::type, void>::type*() const {
    return const_cast<typename std::remove_const<T>::type*>(this->first);
  }
  template <typename Index>
  T* operator+(Index i) const {
    const long long at = static_cast<long long>(i);
    if (at < 0 || at > this->count) fail(std::string(this->name) + " + " + std::to_string(at));
    return this->first + at;
  }
};

} // namespace host

// Numbers that become a float, and are made of one, by name only: what a kernel computes in is then
// what it says.
struct half {
  std::uint16_t bits;
  half() = default;
  explicit half(float value) {
    std::uint32_t x = host::same_bits<std::uint32_t>(value);
    const std::uint32_t sign = (x >> 16) & 0x8000u;
    x &= 0x7fffffffu;
    if (x > 0x7f800000u) {
      x = 0x7e00u;
    } else if (x >= 0x477ff000u) {
      x = 0x7c00u;
    } else if (x < 0x38800000u) {
      x = host::same_bits<std::uint32_t>(host::same_bits<float>(x) + 0.5f) - 0x3f000000u;
    } else {
      x = (x + 0xfffu + ((x >> 13) & 1u) - 0x38000000u) >> 13;
    }
    bits = std::uint16_t(sign | x);
  }
  explicit operator float() const {
    const std::uint32_t rest = bits & 0x7fffu;
    float value = host::same_bits<float>(rest << 13) * 0x1p112f;
    if (rest >= 0x7c00u) value = rest == 0x7c00u ? INFINITY : NAN;
    return (bits & 0x8000u) != 0 ? -value : value;
  }
};

struct bfloat {
  std::uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {
    const std::uint32_t x = host::same_bits<std::uint32_t>(value);
    bits = std::uint16_t(std::isnan(value) ? 0x7fc0u : (x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return host::same_bits<float>(std::uint32_t(bits) << 16); }
};

typedef half float16_t;
typedef bfloat bfloat16_t;
typedef std::uint32_t uint;
struct uint3 {
  uint x, y, z;
};

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  host::group()->lane().orders_memory = flags == mem_flags::mem_threadgroup;
  host::group()->wait(host::At::barrier, "threadgroup_barrier", line);
}
template <typename T>
T simd_sum(T value, int line = __builtin_LINE()) {
  return host::across("simd_sum", line, value, [](T a, T b) { return a + b; });
}
template <typename T>
T simd_max(T value, int line = __builtin_LINE()) {
  return host::across("simd_max", line, value, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
T simd_min(T value, int line = __builtin_LINE()) {
  return host::across("simd_min", line, value, [](T a, T b) { return a < b ? a : b; });
}
template <typename To, typename From>
To as_type(From value) {
  return host::same_bits<To>(value);
}
namespace metal {
inline float exp(float value) { return std::exp(value); }
inline float log(float value) { return std::log(value); }
namespace precise {
inline float rsqrt(float value) { return 1.0f / std::sqrt(value); }
} // namespace precise
} // namespace metal

// Runs every threadgroup of a launch.
template <typename Body>
void launch(int blocks, int x, int y, host::Order order, char* shared, std::size_t bytes, Body body) {
  for (int n = 0; n < blocks; ++n) {
    const uint block = uint(order == host::Order::backward ? blocks - 1 - n : n);
    host::Group group(x * y, order, shared, bytes);
    host::group() = &group;
    group.run([&body, block, x](int i) {
      body(uint3{uint(i % x), uint(i / x), 0}, uint3{block, 0, 0});
    });
  }
}

// Threadgroup memory of one kernel: a section of its own, so that its bounds are known.
#if defined(__APPLE__)
#define SHARED_OF(name) static volatile __attribute__((section("__DATA," #name)))
#define SHARED_BOUNDS(name)                                \
  extern char name##_start asm("section$start$__DATA$" #name); \
  extern char name##_end asm("section$end$__DATA$" #name)
#else
#define SHARED_OF(name) static volatile __attribute__((section(#name)))
#define SHARED_BOUNDS(name)                                                \
  extern __attribute__((weak)) char name##_start asm("__start_" #name); \
  extern __attribute__((weak)) char name##_end asm("__stop_" #name)
#endif

// A pointer into device memory is C++'s own; the test looks whether each names its address space.
#define device
// From here on these are words of Metal, so no names; and what only other languages have is none.
#pragma GCC poison kernel constant thread vertex fragment
#pragma GCC poison std double expf exp2f logf log1pf sqrtf rsqrtf fabsf fmaxf fminf
