#include "group/check.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "collectives/choose.h"

namespace pycomm::group {
namespace {

[[noreturn]] void refuse(const Call& call, int rank, const std::string& why) {
  const std::string op(name_of(call.operation));
  throw InvalidArgument(op + ": " + why, {.op = op, .rank = rank});
}

// Whether a rank has `count` elements for each rank, in its input, its output or both.
bool has_parts(Operation operation) {
  return operation == Operation::all_gather || operation == Operation::reduce_scatter ||
         operation == Operation::gather || operation == Operation::scatter ||
         operation == Operation::all_to_all;
}

void check_peer(const Call& call, int rank, int size) {
  if (is_plan(call.operation) && !is_rooted(call.operation)) return;
  if (call.operation == Operation::recv && call.peer == kAnySource) {
    if (size == 1) refuse(call, rank, "cannot receive from any rank in a group of size 1");
    return;
  }
  if (call.peer < 0 || call.peer >= size)
    refuse(call, rank,
           "invalid rank " + std::to_string(call.peer) + " in a group of size " +
               std::to_string(size));
  if (!is_plan(call.operation) && call.peer == rank)
    refuse(call, rank, "rank " + std::to_string(call.peer) + " cannot send to itself");
}

void check_counts(const Call& call, int rank, int size) {
  const bool to_all = call.operation == Operation::all_to_all;
  if (!to_all && call.operation != Operation::all_gather)
    refuse(call, rank, "does not accept counts");
  const auto ranks = static_cast<size_t>(size), me = static_cast<size_t>(rank);
  const size_t wanted = to_all ? 2 * ranks : ranks;
  if (call.counts.size() != wanted)
    refuse(call, rank,
           "expected " + std::to_string(wanted) + " counts in a group of size " +
               std::to_string(size) + ", got " + std::to_string(call.counts.size()));
  if (call.count != 0) refuse(call, rank, "takes either a count or a list of counts, not both");
  if (to_all && call.counts[me] != call.counts[ranks + me])
    refuse(call, rank,
           "this rank sends itself " + std::to_string(call.counts[me]) + " elements and expects " +
               std::to_string(call.counts[ranks + me]));
}

// FNV-1a hash of a list of counts, to detect lists that differ. Never 0, which means no list.
uint32_t hash_of(std::span<const size_t> counts) {
  uint32_t hash = 2166136261u;
  for (const std::byte byte : std::as_bytes(counts))
    hash = (hash ^ static_cast<uint32_t>(byte)) * 16777619u;
  return std::max(hash, 1u);
}

}  // namespace

Extent extent_of(const Call& call, int rank, int size) {
  const auto ranks = static_cast<size_t>(size);
  const bool is_root = rank == call.peer;
  const size_t one = call.count, all = call.count * ranks;
  switch (call.operation) {
    case Operation::all_reduce:
      return {one, one};
    case Operation::reduce:
      return {one, is_root ? one : 0};
    case Operation::broadcast:
    case Operation::recv:
      return {0, one};
    case Operation::send:
      return {one, 0};
    case Operation::all_gather:
      if (call.counts.empty()) return {one, all};
      return {call.counts[static_cast<size_t>(rank)], total(call.counts)};
    case Operation::gather:
      return {one, is_root ? all : 0};
    case Operation::reduce_scatter:
      return {all, one};
    case Operation::scatter:
      return {is_root ? all : 0, one};
    case Operation::all_to_all:
      if (call.counts.empty()) return {all, all};
      return {total(std::span(call.counts).first(ranks)),
              total(std::span(call.counts).last(ranks))};
    case Operation::barrier:
      break;
  }
  return {};
}

void throw_unsupported(const Call& call, const std::string& what) {
  const std::string op(name_of(call.operation));
  throw Unsupported(op + " of CUDA arrays: " + what, {.op = op});
}

bool is_plan(Operation operation) {
  return operation != Operation::send && operation != Operation::recv;
}

bool is_rooted(Operation operation) {
  return operation == Operation::broadcast || operation == Operation::reduce ||
         operation == Operation::gather || operation == Operation::scatter;
}

bool reduces(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce_scatter ||
         operation == Operation::reduce;
}

size_t total(std::span<const size_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), size_t{0});
}

// See AlgorithmQuery in collectives/choose.h: the mean, rounded up; 0 for an all_to_all with
// counts.
size_t count_to_choose_by(const Call& call) {
  const size_t ranks = call.counts.size();
  if (ranks == 0 || call.operation != Operation::all_gather) return call.count;
  return (total(call.counts) + ranks - 1) / ranks;
}

const kernels::Reducer* check_call(const Call& call, int rank, int size) {
  const size_t factor = has_parts(call.operation) ? static_cast<size_t>(size) : 1;
  const size_t most = (SIZE_MAX >> 4) / factor / bytes_of(call.dtype);
  for (const size_t count : call.counts.empty() ? std::span(&call.count, 1) : call.counts)
    if (count > most)
      refuse(
          call, rank,
          "invalid count " + std::to_string(count) + ": the array would exceed the address space");
  if (!call.counts.empty()) check_counts(call, rank, size);
  const Extent extent = extent_of(call, rank, size);
  const size_t missing = std::max(call.input == nullptr ? extent.input : 0,
                                  call.output == nullptr ? extent.output : 0);
  if (missing > 0)
    refuse(call, rank, "an array of " + std::to_string(missing) + " elements has no address");
  check_peer(call, rank, size);
  const kernels::Reducer* const found =
      reduces(call.operation) ? &kernels::reducer(call.dtype, call.op) : nullptr;
  if (!is_plan(call.operation) || call.algorithm == Algorithm::automatic) return found;
  if (call.algorithm == Algorithm::shared_memory && call.counts.empty()) return found;
  const bool has_counts = !call.counts.empty();
  const auto known = collectives::algorithms_for(call.operation, has_counts);
  if (std::ranges::find(known, call.algorithm) == known.end())
    throw Unsupported(std::string(name_of(call.operation)) + (has_counts ? " with counts" : "") +
                          " has no algorithm \"" + std::string(name_of(call.algorithm)) + "\"",
                      {.op = std::string(name_of(call.operation)), .rank = rank});
  return found;
}

transport::Header signature_of(const Call& call, Algorithm algorithm) {
  transport::Header header;
  const bool message = !is_plan(call.operation);
  header.operation = static_cast<uint8_t>(message ? Operation::send : call.operation);
  header.dtype = static_cast<uint8_t>(call.dtype);
  header.op = reduces(call.operation) ? static_cast<uint8_t>(call.op) : 0;
  header.algorithm = static_cast<uint8_t>(algorithm);
  if (call.device.agreement) header.algorithm |= transport::kOnDevice;
  header.count = call.count;
  header.peer = call.tag;
  if (is_rooted(call.operation)) header.peer = static_cast<uint32_t>(call.peer);
  if (call.operation == Operation::all_gather && !call.counts.empty()) {
    header.count = total(call.counts);
    header.peer = hash_of(call.counts) + call.tag;
  }
  // An all_to_all with counts and one without never match, even if the counts are equal. Nor do one
  // that gathers the counts and one that does not.
  if (call.operation == Operation::all_to_all && !call.counts.empty())
    header.peer = call.counts_fit ? call.tag | 2 : 1;
  return header;
}

observe::CallRecord record_of(const Call& call, const transport::Header& header,
                              const Deadline& deadline) {
  observe::CallRecord record;
  record.begun = observe::nanoseconds_of(deadline.start());
  record.count = header.count;
  if (call.operation == Operation::all_to_all && !call.counts.empty())
    record.count = total(std::span(call.counts).first(call.counts.size() / 2));
  record.sequence = header.sequence;
  record.epoch = header.epoch;
  record.tag = call.tag;
  record.peer = call.peer;
  record.operation = static_cast<uint8_t>(call.operation);
  record.dtype = header.dtype;
  record.op = header.op;
  record.algorithm = header.algorithm & static_cast<uint8_t>(~transport::kOnDevice);
  return record;
}

}  // namespace pycomm::group
