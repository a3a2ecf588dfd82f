// Instruction sets of the compiled loops, and which of them this processor supports.
//
// A loop is written once, without a target, and always inlined; On<isa>::run is a function with a
// target, into which the loop is inlined and vectorized. So no file needs compiler flags of its
// own, and no inline function compiled for a newer target is linked elsewhere. The choice is a
// plain pointer: an ifunc (target_clones) would be resolved before the sanitizers start.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace pycomm::cpu {

// Each set includes the ones before it. avx2 means FMA and F16C, too; avx512 its F, BW, DQ and VL
// extensions. The last two have loops of their own for 16-bit floats only.
enum class Isa : uint8_t { baseline, avx2, avx512, avx512_bf16, avx512_fp16 };

inline constexpr std::array kIsas{Isa::baseline, Isa::avx2, Isa::avx512, Isa::avx512_bf16,
                                  Isa::avx512_fp16};
inline constexpr std::array<std::string_view, kIsas.size()> kIsaNames{"baseline", "avx2", "avx512",
                                                                      "avx512_bf16", "avx512_fp16"};

inline bool runs_here(Isa isa) {
#ifdef __x86_64__
  switch (isa) {
    case Isa::baseline:
      break;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return runs_here(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::avx512_bf16:
      return runs_here(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
    case Isa::avx512_fp16:
      return runs_here(Isa::avx512_bf16) && __builtin_cpu_supports("avx512fp16");
  }
#endif
  return isa == Isa::baseline;
}

// The set in use: the best of this processor, or the one that a test selected.
std::atomic<Isa>& chosen_isa();
inline Isa isa_here() { return chosen_isa().load(std::memory_order_relaxed); }

template <Isa>
struct On;

template <>
struct On<Isa::baseline> {
  template <typename Loop, typename... Args>
  static auto run(Args... args) {
    return Loop::template run<Isa::baseline>(args...);
  }
};

#ifdef __x86_64__
template <>
struct On<Isa::avx2> {
  template <typename Loop, typename... Args>
  [[gnu::target("avx2,fma,f16c")]] static auto run(Args... args) {
    return Loop::template run<Isa::avx2>(args...);
  }
};
template <>
struct On<Isa::avx512> {
  template <typename Loop, typename... Args>
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]] static auto run(
      Args... args) {
    return Loop::template run<Isa::avx512>(args...);
  }
};
template <>
struct On<Isa::avx512_bf16> {
  template <typename Loop, typename... Args>
  [[gnu::target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]] static auto run(
      Args... args) {
    return Loop::template run<Isa::avx512_bf16>(args...);
  }
};
template <>
struct On<Isa::avx512_fp16> {
  template <typename Loop, typename... Args>
  [[gnu::target("avx512fp16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]] static auto run(
      Args... args) {
    return Loop::template run<Isa::avx512_fp16>(args...);
  }
};
#endif

// Loop::run for `isa`, which this processor must support. avx512 also serves the sets above it.
template <typename Loop, typename... Args>
auto run_on([[maybe_unused]] Isa isa, Args... args) {
#ifdef __x86_64__
  if (isa >= Isa::avx512) return On<Isa::avx512>::run<Loop>(args...);
  if (isa == Isa::avx2) return On<Isa::avx2>::run<Loop>(args...);
#endif
  return On<Isa::baseline>::run<Loop>(args...);
}

// The instruction set of the CPU loops, one of kIsaNames; by default the best one available.
// Results do not depend on it; tests select it. Throws Unsupported for one that this processor
// lacks.
void set_kernel_isa(std::string_view name);
std::string_view kernel_isa();

}  // namespace pycomm::cpu
