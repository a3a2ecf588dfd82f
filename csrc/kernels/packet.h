// An encoded packet: k of (index, value) in one piece of bytes that can travel. The same layout on
// every device; little-endian.
//
//   0   magic "PYCOMMPK"                    24  value dtype, a byte, as in core/dtype.h
//   8   k, 64 bits                          25  codec, a byte: 0 is this layout, "raw"
//   16  count of the array, 64 bits         26  zeros
//   32  values [k], then zeros up to a multiple of 4
//       indices [k], int32, ascending
//
// The header names its codec, so that one whose indices take fewer bits can stand beside this one.
// Called by the bindings and by every implementation of DeviceKernels.
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

namespace pycomm {

static_assert(std::endian::native == std::endian::little, "packets are written as they lie");

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

// The header of bytes from anywhere. Throws InvalidArgument, with a sentence, unless they are a
// packet whose every field can be believed; the indices are checked by whoever reads them.
inline PacketHeader read_packet_header(std::span<const std::byte> bytes) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("not a packet: " + why + " (" + std::to_string(bytes.size()) + " bytes)");
  };
  PacketHeader header;
  if (bytes.size() < sizeof header) refuse("shorter than its header");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kPacketMagic) refuse("it does not begin with its magic word");
  if (header.codec != Codec::raw) refuse("its codec is not known here");
  if (!is_float(header.value_dtype)) refuse("its values are not floats");
  if (header.zeros != decltype(header.zeros){}) refuse("its reserved bytes are not zero");
  if (header.count >> 31 != 0 || header.k > header.count) refuse("its counts make no sense");
  if (bytes.size() != raw_packet_bytes(header.k, header.value_dtype))
    refuse("k = " + std::to_string(header.k) + " takes another length");
  return header;
}

}  // namespace pycomm
