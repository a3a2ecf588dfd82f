// Arrays of bits in bytes, lowest first: numbers in unary, and numbers of a fixed width. Called by
// the index codes. Every function is inlined into its loop, so that the loop's target is theirs.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace pycomm::cpu {

constexpr size_t bytes_of_bits(uint64_t bits) { return (bits + 7) / 8; }

// Writes 64 bits at a time; finish() writes the bytes of the rest.
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
  // Where the next byte goes.
  std::byte* finish() const {
    if (at_ > 0) std::memcpy(out_, &word_, bytes_of_bits(at_));
    return out_ + bytes_of_bits(at_);
  }

 private:
  std::byte* out_;
  uint64_t word_ = 0, at_ = 0;  // bits of `word_` that are written, 64 at most
};

class BitsWriter {
 public:
  explicit BitsWriter(std::byte* out) : out_(out) {}

  // The lowest `width` bits, 31 at most; the others are 0.
  [[gnu::always_inline]] void put(uint64_t number, unsigned width) {
    word_ |= number << at_;
    at_ += width;
    if (at_ >= 64) [[unlikely]] {
      std::memcpy(out_, &word_, sizeof word_);
      out_ += sizeof word_;
      at_ -= 64;
      word_ = number >> (width - at_);
    }
  }
  std::byte* finish() const {
    if (at_ > 0) std::memcpy(out_, &word_, bytes_of_bits(at_));
    return out_ + bytes_of_bits(at_);
  }

 private:
  std::byte* out_;
  uint64_t word_ = 0;
  unsigned at_ = 0;  // below 64
};

// The places of the ones, one after another.
class OnesReader {
 public:
  explicit OnesReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  // Of the next one, counted in bits from the begin; kNone where there is no other.
  [[gnu::always_inline]] uint64_t next() {
    while (word_ == 0) [[unlikely]] {
      if (at_ >= bytes_.size()) return kNone;
      load();
    }
    const auto bit = static_cast<unsigned>(std::countr_zero(word_));
    word_ &= word_ - 1;
    return base_ + bit;
  }
  // Passes over the first `bits`.
  void skip(uint64_t bits) {
    at_ = bits / 64 * sizeof word_;
    if (at_ >= bytes_.size()) return;
    load();
    word_ &= ~uint64_t{0} << bits % 64;
  }

  static constexpr uint64_t kNone = ~uint64_t{0} >> 1;  // far, and adding to it does not wrap

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

// 8 bytes of which the lowest are bits [at, at + 31); `bytes` must reach that far.
[[gnu::always_inline]] inline uint64_t bits_at(const std::byte* bytes, uint64_t at) {
  uint64_t word;
  std::memcpy(&word, bytes + at / 8, sizeof word);
  return word >> at % 8;
}

}  // namespace pycomm::cpu
