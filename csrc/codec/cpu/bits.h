// Bit arrays in bytes, lowest bit first: unary numbers, and numbers of a fixed width. Every
// function is inlined into its loop, so it is compiled for the target of the loop.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "codec/format.h"

namespace pycomm::codec {

// Writes 64 bits at a time; finish() writes the remaining bytes.
class UnaryWriter {
 public:
  explicit UnaryWriter(std::byte* out) : out_(out) {}

  // `zeros` zeros and a one.
  [[gnu::always_inline]] void put(uint64_t zeros) {
    at_ += zeros;
    while (at_ >= 64) [[unlikely]] {
      std::memcpy(out_, &word_, sizeof word_);
      out_ += sizeof word_;
      word_ = 0;
      at_ -= 64;
    }
    word_ |= uint64_t{1} << at_++;
  }
  // Position of the next byte.
  std::byte* finish() const {
    if (at_ > 0) std::memcpy(out_, &word_, bytes_of_bits(at_));
    return out_ + bytes_of_bits(at_);
  }

 private:
  std::byte* out_;
  uint64_t word_ = 0, at_ = 0;  // at_: bits written in `word_`, at most 64
};

// Iterates over the positions of the ones.
class OnesReader {
 public:
  explicit OnesReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  // Bit position of the next one, or kNone.
  [[gnu::always_inline]] uint64_t next() {
    while (word_ == 0) [[unlikely]] {
      if (at_ >= bytes_.size()) return kNone;
      load();
    }
    const auto bit = static_cast<unsigned>(std::countr_zero(word_));
    word_ &= word_ - 1;
    return base_ + bit;
  }
  // Skips the first `bits`.
  void skip(uint64_t bits) {
    at_ = bits / 64 * sizeof word_;
    if (at_ >= bytes_.size()) return;
    load();
    word_ &= ~uint64_t{0} << bits % 64;
  }

  static constexpr uint64_t kNone = ~uint64_t{0} >> 1;  // large, but additions to it do not wrap

 private:
  [[gnu::always_inline]] void load() {
    base_ = uint64_t{at_} * 8;
    const size_t rest = bytes_.size() - at_;
    if (rest >= sizeof word_) [[likely]]
      std::memcpy(&word_, bytes_.data() + at_, sizeof word_);
    else
      std::memcpy(&word_, bytes_.data() + at_, rest);  // word_ was 0
    at_ += sizeof word_;
  }

  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  uint64_t word_ = 0, base_ = 0;
};

inline constexpr size_t kPacked = kRiceBlock;  // numbers of b bits, which fill b words
inline constexpr unsigned kMostWidth = kMostParameter;

template <unsigned kWidth>
void pack(const uint32_t* numbers, std::byte* out) {
  uint64_t word = 0;
#pragma GCC unroll 64
  for (unsigned i = 0; i < kPacked; ++i) {
    const unsigned at = i * kWidth % 64, end = at + kWidth;
    word |= uint64_t{numbers[i]} << at;
    if (end < 64) continue;
    std::memcpy(out + i * kWidth / 64 * sizeof word, &word, sizeof word);
    word = end > 64 ? uint64_t{numbers[i]} >> (64 - at) % 64 : 0;
  }
}

template <unsigned kWidth>
void unpack(const std::byte* in, uint32_t* numbers) {
  uint64_t word = 0;
#pragma GCC unroll 64
  for (unsigned i = 0; i < kPacked; ++i) {
    const unsigned at = i * kWidth % 64, end = at + kWidth;
    if (at == 0) std::memcpy(&word, in + i * kWidth / 8, sizeof word);
    uint64_t number = word >> at;
    if (end > 64) {
      std::memcpy(&word, in + (i * kWidth / 64 + 1) * sizeof word, sizeof word);
      number |= word << (64 - at) % 64;
    }
    numbers[i] = static_cast<uint32_t>(number & ((uint64_t{1} << kWidth) - 1));
  }
}
template <>
inline void unpack<0>(const std::byte*, uint32_t* numbers) {
  std::fill_n(numbers, kPacked, 0);
}

// pack and unpack of each width.
template <typename Sequence>
struct Packing;
template <size_t... kWidths>
struct Packing<std::index_sequence<kWidths...>> {
  static constexpr std::array<void (*)(const uint32_t*, std::byte*), sizeof...(kWidths)> kPack{
      pack<kWidths>...};
  static constexpr std::array<void (*)(const std::byte*, uint32_t*), sizeof...(kWidths)> kUnpack{
      unpack<kWidths>...};
};
using Packings = Packing<std::make_index_sequence<kMostWidth + 1>>;

}  // namespace pycomm::codec
