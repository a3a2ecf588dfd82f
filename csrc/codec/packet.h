// An encoded packet: k pairs (index, value) as one sequence of bytes. The layout is the same on
// every device; little-endian.
//
//   0   magic "PYCOMMPK"                    24  value dtype, a byte, as in core/dtype.h
//   8   k, 64 bits                          25  codec, a byte: 0 is this layout, "raw"
//   16  count of the array, 64 bits         26  zeros
//   32  values [k], then zeros up to a multiple of 4
//       indices [k], int32, ascending
//
// The header names its codec, so that other codecs can be added.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "core/dtype.h"
#include "core/errors.h"

namespace pycomm::codec {

static_assert(std::endian::native == std::endian::little, "packets are written in host byte order");

// A packet in memory: `count` pairs (index, value).
struct Packet {
  const int32_t* indices;
  const void* values;
  size_t count;
};

inline constexpr size_t kPacketHeaderBytes = 32;
inline constexpr std::array<char, 8> kPacketMagic{'P', 'Y', 'C', 'O', 'M', 'M', 'P', 'K'};

enum class Codec : uint8_t { raw };

struct PacketHeader {
  std::array<char, 8> magic = kPacketMagic;
  uint64_t k = 0;
  uint64_t count = 0;
  Dtype value_dtype = Dtype::float32;
  Codec codec = Codec::raw;
  std::array<std::byte, 6> zeros{};
};
static_assert(sizeof(PacketHeader) == kPacketHeaderBytes);

constexpr bool is_float(Dtype dtype) { return dtype <= Dtype::float64; }

constexpr size_t raw_indices_offset(size_t k, Dtype value_dtype) {
  return kPacketHeaderBytes + (k * bytes_of(value_dtype) + 3) / 4 * 4;
}
constexpr size_t raw_packet_bytes(size_t k, Dtype value_dtype) {
  return raw_indices_offset(k, value_dtype) + k * sizeof(int32_t);
}

// Reads the header of arbitrary bytes. Throws InvalidArgument, with the reason, unless every field
// is valid. The caller must check the indices.
inline PacketHeader read_packet_header(std::span<const std::byte> bytes) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("invalid packet: " + why + " (" + std::to_string(bytes.size()) +
                          " bytes)");
  };
  PacketHeader header;
  if (bytes.size() < sizeof header) refuse("it is shorter than its header");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kPacketMagic) refuse("its magic word is invalid");
  if (header.codec != Codec::raw) refuse("its codec is unknown");
  if (!is_float(header.value_dtype)) refuse("its value dtype is not a float dtype");
  if (header.zeros != decltype(header.zeros){}) refuse("its reserved bytes are not zero");
  if (header.count >> 31 != 0 || header.k > header.count) refuse("its k or count is out of range");
  if (bytes.size() != raw_packet_bytes(header.k, header.value_dtype))
    refuse("its length does not match k = " + std::to_string(header.k));
  return header;
}

}  // namespace pycomm::codec
