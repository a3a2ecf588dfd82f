// The connections of a fake NCCL communicator: sockets between threads or processes of one machine,
// and one message over them.
//
// Stricter than NCCL: a send ends only when its receive has taken all of it, and both must agree on
// the contents.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/nccl.h"

namespace fake_nccl {

// ThreadSanitizer does not see this lock, as this folder is not instrumented. A visible lock would
// order streams and threads that a GPU does not order, and hide a missing event.
class Lock {
 public:
  void lock() {
    while (taken_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  void unlock() { taken_.clear(std::memory_order_release); }

 private:
  std::atomic_flag taken_;
};

enum class Kind : uint32_t { message, all_reduce, all_gather, reduce_scatter, broadcast };

// A collective of a communicator. Its first one has the number 1; 0: none.
struct Launched {
  uint64_t communicator = 0, number = 0;
  bool operator==(const Launched&) const = default;
};

// What precedes every message; both sides must agree on all of it.
struct Header {
  Kind kind{};
  pycomm::nccl::NcclDtype dtype{};
  pycomm::nccl::NcclOp op{};
  int32_t root = 0;
  uint64_t count = 0;
  // A collective: the last one that was enqueued before it, of any communicator of both devices.
  Launched before{};
  bool operator==(const Header&) const = default;
};
std::string text(const Header& header);

// The collectives that this process enqueued for two devices, in the order of the calls, to compare
// it with the order of the peer. A device is a process and its number.
using Place = std::pair<int, int>;
// The last one of both devices, which `now` replaces.
Launched exchange_last(Place mine, Place theirs, Launched now);
// From now on ranks may have enqueued different calls of it.
void forget_order(uint64_t communicator);

struct Failed : std::runtime_error {
  pycomm::nccl::NcclResult result;
  Failed(pycomm::nccl::NcclResult r, const std::string& what)
      : std::runtime_error(what), result(r) {}
};

// A socket for each direction with each peer, so that both can be in flight.
class Wires {
 public:
  Wires(int size, int rank) : size_(size), rank_(rank) {}
  ~Wires();
  Wires(const Wires&) = delete;
  Wires& operator=(const Wires&) = delete;

  // Connects to all ranks, each with its own device. Blocks; `given_up` ends that. Throws Failed.
  void connect(const pycomm::nccl::NcclId& id, int device, const std::function<bool()>& given_up);
  void hang_up();
  // NCCL connects ranks at their first messages or collective: waits until these peers call it too,
  // and returns at once from then on. Blocks and throws as connect() does. One thread at a time.
  void meet(const std::set<int>& peers, bool for_messages, const std::function<bool()>& given_up);
  void end_meetings();  // while no thread is in meet(), which throws from then on
  // The process and the device of a rank.
  Place place(int rank) const { return places_.at(static_cast<size_t>(rank)); }

  int size() const { return size_; }
  int rank() const { return rank_; }

 private:
  friend class Transfer;
  int size_, rank_;
  std::vector<int> out_, in_;            // by peer; nothing for oneself
  std::vector<int> meet_out_, meet_in_;  // the same, for meet(); empty: see end_meetings()
  std::vector<Place> places_;
  struct Met {
    bool sent = false, received = false;
  };
  std::vector<std::array<Met, 2>> met_;  // by peer, and whether for messages
};

// One message, sent or received. step() does what can be done without waiting.
class Transfer {
 public:
  Transfer(Header header, int peer, std::byte* data, size_t bytes, bool sends)
      : header_(header), peer_(peer), data_(data), bytes_(bytes), sends_(sends) {}
  // True when the whole message has moved. Throws Failed: a mismatch, or a peer that has gone.
  bool step(Wires& wires);
  int peer() const { return peer_; }
  bool sends() const { return sends_; }

 private:
  enum class Stage : uint8_t { header, answer, payload, over };
  bool move(int fd, void* at, size_t bytes, bool out);
  void judge(const Wires& wires);
  [[noreturn]] void refused(const Wires& wires, const std::string& theirs) const;

  Header header_, seen_{};
  int peer_;
  std::byte* data_;
  size_t bytes_;
  bool sends_;
  char answer_ = 0;
  Stage stage_ = Stage::header;
  size_t done_ = 0;  // bytes of this stage
};

}  // namespace fake_nccl
