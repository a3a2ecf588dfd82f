// Ranks as threads that run plans on emulated streams: each with its own device, stream and fake
// NCCL, and a mailbox to ranks of other hosts.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "collectives/collectives.h"
#include "core/errors.h"
#include "cuda/cuda_device.h"
#include "device/stream_engine.h"
#include "emulator/fake_nccl.hpp"
#include "native/harness.h"

namespace stream_ranks {

using namespace pycomm;
using fake_nccl::FakeNccl;

inline constexpr std::chrono::seconds kLong{60};

inline void fine(cudaError_t error) {
  if (error != cudaSuccess) throw Failure(std::string("CUDA: ") + cudaGetErrorString(error));
}

inline Deadline soon() { return Deadline(kLong); }
// An array of the emulated device, written and read in order with a stream.
class Floats {
 public:
  explicit Floats(size_t count, float value = -1) : count_(count), host_(count, value) {
    fine(cudaMalloc(reinterpret_cast<void**>(&at_), (count + 1) * sizeof(float)));
  }
  ~Floats() { cudaFree(at_); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  template <class F>
  void write(F value, cudaStream_t stream) {
    for (size_t i = 0; i < count_; ++i) host_[i] = value(i);
    fine(cudaMemcpyAsync(at_, host_.data(), count_ * 4, cudaMemcpyHostToDevice, stream));
  }
  std::vector<float> read(cudaStream_t stream) {
    std::vector<float> to(count_);
    fine(cudaMemcpyAsync(to.data(), at_, count_ * 4, cudaMemcpyDeviceToHost, stream));
    fine(cudaStreamSynchronize(stream));
    return to;
  }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(at_); }

 private:
  size_t count_;
  std::vector<float> host_;  // copies read it when the stream gets there
  float* at_ = nullptr;
};

// Data in transit between ranks without a common communicator: parts of messages.
class Mail {
 public:
  struct Part {
    size_t of;  // bytes of the message
    std::vector<std::byte> bytes;
  };
  void put(int from, int to, Part part) {
    const std::lock_guard lock(mutex_);
    boxes_[{from, to}].push_back(std::move(part));
    ++changes_;
    changed_.notify_all();
  }
  std::optional<Part> take(int from, int to) {
    const std::lock_guard lock(mutex_);
    auto& box = boxes_[{from, to}];
    if (box.empty()) return std::nullopt;
    auto part = std::move(box.front());
    box.pop_front();
    return part;
  }
  // Changes so far, and a wait for more of them than `seen`.
  uint64_t changes() {
    const std::lock_guard lock(mutex_);
    return changes_;
  }
  void wait(uint64_t seen) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || changes_ > seen; });
    if (ended_) throw GroupBroken("the mail has ended");
  }
  void wake() {
    const std::lock_guard lock(mutex_);
    ++changes_;
    changed_.notify_all();
  }
  void end() noexcept {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  uint64_t changes_ = 0;
  std::map<std::pair<int, int>, std::deque<Part>> boxes_;
};

class MailPost final : public device::HostTransport {
 public:
  MailPost(int rank, std::shared_ptr<Mail> mail) : rank_(rank), mail_(std::move(mail)) {}
  void exchange(std::span<const device::PeerMessage> messages, std::chrono::nanoseconds,
                MessageProgress& progress) override {
    progress.set_wake([mail = mail_] { mail->wake(); });
    std::vector<size_t> done(messages.size());
    for (;;) {
      const uint64_t seen = mail_->changes();
      std::set<std::pair<int, bool>> busy;  // peers and directions with an earlier message
      bool moved = false;
      for (size_t i = 0; i < messages.size(); ++i) {
        const device::PeerMessage& one = messages[i];
        if (done[i] == one.bytes || !busy.emplace(one.peer, one.sends).second) continue;
        moved |= one.sends ? send(one, progress.ready(i), done[i]) : receive(one, done[i]);
        if (!one.sends) progress.received(i, done[i]);
      }
      if (busy.empty()) break;
      if (!moved) mail_->wait(seen);
    }
    progress.set_wake({});
  }
  void abort(const std::string&) noexcept override { mail_->end(); }
  void close() noexcept override {}

 private:
  bool send(const device::PeerMessage& one, size_t ready, size_t& done) const {
    if (ready == done) return false;
    mail_->put(rank_, one.peer, {one.bytes, {one.data + done, one.data + ready}});
    done = ready;
    return true;
  }
  bool receive(const device::PeerMessage& one, size_t& done) const {
    const auto part = mail_->take(one.peer, rank_);
    if (!part) return false;
    if (part->of != one.bytes) throw Mismatch("a message of another size");
    std::memcpy(one.data + done, part->bytes.data(), part->bytes.size());
    done += part->bytes.size();
    return true;
  }

  int rank_;
  std::shared_ptr<Mail> mail_;
};

struct Rank {
  int rank, size;
  std::vector<int> hosts{};
  std::shared_ptr<FakeNccl> nccl = std::make_shared<FakeNccl>();
  std::shared_ptr<device::Device> device = cuda::open_device(rank);
  device::StreamEngine engine{nccl, device, rank, size};
  cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    fine(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  void finish() { fine(cudaStreamSynchronize(stream)); }
  bool is_near(int peer) const {
    return hosts.empty() || hosts[static_cast<size_t>(peer)] == hosts[static_cast<size_t>(rank)];
  }
  void run(const device::StreamJob& job) {
    engine.prepare(job, stream);
    device::Event before(device);
    before.record(stream);
    engine.enqueue(job, before)->stream_wait(stream);
  }
};

// The ranks of a rank's communicators where `hosts`, by rank, are several, and its path to others.
inline device::RemoteRanks far_ranks(int rank, const std::vector<int>& hosts,
                                     const std::array<std::shared_ptr<Mail>, 2>& mails) {
  device::RemoteRanks far;
  int next = 0;
  for (const int host : hosts)
    far.local_ranks.push_back(host == hosts[static_cast<size_t>(rank)] ? next++
                                                                       : collectives::kNoRank);
  for (const auto& mail : mails)
    if (!hosts.empty()) far.transports.push_back(std::make_unique<MailPost>(rank, mail));
  return far;
}

// Ranks as threads, by rank on `hosts`, or all on one; the first error of the lowest rank is thrown
// when all are done.
inline void each_rank(int size, const std::function<void(Rank&)>& body,
                      const std::vector<int>& hosts = {}) {
  FakeNccl names;
  constexpr size_t kLanes = 2, kHosts = 2;
  std::array<std::array<nccl::NcclId, kLanes>, kHosts> ids{};
  for (auto& of_host : ids)
    for (nccl::NcclId& id : of_host) (void)names.get_unique_id(id);
  const std::array mails{std::make_shared<Mail>(), std::make_shared<Mail>()};
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        fine(cudaSetDevice(rank));
        Rank mine{.rank = rank, .size = size};
        const auto host = hosts.empty() ? 0 : hosts[static_cast<size_t>(rank)];
        mine.hosts = hosts;
        mine.engine.connect(ids[static_cast<size_t>(host)], far_ranks(rank, hosts, mails), soon());
        body(mine);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (size_t rank = 0; rank < errors.size(); ++rank)
    expect(errors[rank].empty(), "rank " + std::to_string(rank) + ": " + errors[rank]);
}

// Small, so that sums are exact.
inline float element(int rank, size_t i) {
  return static_cast<float>((i * 3 + static_cast<size_t>(rank) * 5) % 7);
}
inline float sum_of(int size, size_t i) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += element(rank, i);
  return sum;
}

struct Case {
  Operation operation;
  Algorithm algorithm;
  size_t count;
  int root = 0;
};

inline bool has_parts_in(Operation o) {
  return o == Operation::reduce_scatter || o == Operation::scatter || o == Operation::all_to_all;
}
inline bool has_parts_out(Operation o) {
  return o == Operation::all_gather || o == Operation::gather || o == Operation::all_to_all;
}

// Element i of the result on a rank; negative: left alone, or not looked at.
inline float wanted(const Case& one, const Rank& r, size_t i) {
  const size_t part = one.count == 0 ? 0 : i / one.count,
               in_part = one.count == 0 ? 0 : i % one.count;
  const auto mine = static_cast<size_t>(r.rank) * one.count;
  const bool root = r.rank == one.root;
  switch (one.operation) {
    case Operation::all_reduce:
      return sum_of(r.size, i);
    case Operation::reduce:
      return root ? sum_of(r.size, i) : -1;
    case Operation::broadcast:
      return element(one.root, i);
    case Operation::all_gather:
      return element(static_cast<int>(part), in_part);
    case Operation::gather:
      return root ? element(static_cast<int>(part), in_part) : -1;
    case Operation::reduce_scatter:
      return sum_of(r.size, mine + i);
    case Operation::scatter:
      return element(one.root, mine + i);
    case Operation::all_to_all:
      return element(static_cast<int>(part), mine + in_part);
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return -1;
}

inline std::string text_of(const Case& one, const Rank& r) {
  return std::string(name_of(one.operation)) + " by " + std::string(name_of(one.algorithm)) +
         ", count " + std::to_string(one.count) + ", rank " + std::to_string(r.rank);
}

using Lanes = std::vector<device::StreamStages>;

// In place.
inline device::StreamJob all_reduce(Floats& x, size_t count, const Lanes* stages) {
  return {.plan = stages,
          .operation = Operation::all_reduce,
          .dtype = Dtype::float32,
          .input = x.bytes(),
          .output = x.bytes(),
          .count = count};
}

inline Lanes stages_of(const Rank& r, Algorithm algorithm, size_t count, int lanes = 1) {
  const collectives::CollectiveShape at{.rank = r.rank, .size = r.size, .count = count};
  return device::make_channels(collectives::make_plan(algorithm, Operation::all_reduce, at), r.rank,
                               lanes);
}

inline void run_case(Rank& r, const Case& one) {
  const auto size = static_cast<size_t>(r.size);
  Floats in(one.count * (has_parts_in(one.operation) ? size : 1));
  Floats out(one.count * (has_parts_out(one.operation) ? size : 1));
  const bool from_output = one.operation == Operation::broadcast;
  const auto start = [&](size_t i) { return element(r.rank, i); };
  (from_output ? out : in).write(start, r.stream);
  if (!from_output) out.write([](size_t) { return -1.f; }, r.stream);
  const collectives::CollectiveShape at{
      .rank = r.rank, .size = r.size, .count = one.count, .root = one.root, .hosts = r.hosts};
  const collectives::Plan plan = collectives::make_plan(one.algorithm, one.operation, at);
  const Lanes stages =
      device::make_channels(plan, r.rank, one.algorithm == Algorithm::ring && r.size > 1 ? 2 : 1);
  const auto before = r.engine.traffic();
  r.finish();
  (void)r.nccl->take_counts();
  r.run({.plan = &stages,
         .operation = one.operation,
         .dtype = Dtype::float32,
         .input = from_output ? out.bytes() : in.bytes(),
         .output = out.bytes(),
         .count = one.count,
         .peer = one.root});
  const std::vector<float> got = out.read(r.stream);
  for (size_t i = 0; i < got.size(); ++i)
    if (wanted(one, r, i) >= 0)
      expect_equal(got[i], wanted(one, r, i), text_of(one, r) + ", element " + std::to_string(i));
  size_t planned = 0, by_nccl = 0;
  for (const collectives::Move& move : plan.moves)
    if (move.to != collectives::kNoRank && move.to != r.rank) {
      planned += move.out.count * 4;
      if (r.is_near(move.to)) by_nccl += move.out.count * 4;
    }
  const fake_nccl::Counts counts = r.nccl->take_counts();
  expect_equal(counts.bytes_sent, by_nccl, text_of(one, r) + ": bytes are the plan's");
  expect_equal(counts.collectives, uint64_t{0}, "no collective of NCCL's");
  if (one.count % 4 == 0 && one.count >= 64 * size)
    expect_equal(counts.misaligned, uint64_t{0}, text_of(one, r) + ": messages off 16 bytes");
  expect_equal(r.engine.traffic().bytes_sent - before.bytes_sent, planned, "bytes as counted");
  if (r.hosts.empty())
    expect_equal(counts.groups, r.engine.traffic().groups - before.groups, "groups too");
}

inline constexpr Operation kCollectives[] = {
    Operation::all_reduce, Operation::broadcast, Operation::all_gather, Operation::reduce_scatter,
    Operation::reduce,     Operation::gather,    Operation::scatter,    Operation::all_to_all};

}  // namespace stream_ranks
