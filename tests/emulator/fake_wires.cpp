#include "fake_wires.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "fiber.hpp"

namespace fake_nccl {
namespace {

using pycomm::nccl::NcclResult;

constexpr int kLook = 5;  // ms between checks for an abort while ranks connect
constexpr char kYes = 1, kMismatch = 2, kOrder = 3;

struct Hello {
  int32_t rank, size, device, process;
  bool for_meet;
};

socklen_t address(sockaddr_un& at, const pycomm::nccl::NcclId& id, int rank) {
  at = {};
  at.sun_family = AF_UNIX;  // an abstract name: no file, closed with its socket
  const int n = std::snprintf(at.sun_path + 1, sizeof at.sun_path - 1, "fake-nccl-%.48s-%d",
                              id.bytes.data(), rank);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(n));
}

void whole(int fd, Hello& hello, bool out) {
  const ssize_t n = out ? send(fd, &hello, sizeof hello, MSG_NOSIGNAL)
                        : recv(fd, &hello, sizeof hello, MSG_WAITALL);
  if (n != static_cast<ssize_t>(sizeof hello))
    throw Failed(NcclResult::remote_error, "a peer went away while the communicator was made");
}

void throw_if_given_up(const std::function<bool()>& given_up) {
  if (given_up()) throw Failed(NcclResult::internal_error, "given up while ranks were missing");
}

// `met`: the peer listened before, so that it has failed if it does not now; then -1.
int call(const sockaddr_un& at, socklen_t length, bool met, const std::function<bool()>& given_up) {
  for (;;) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&at), length) == 0) return fd;
    close(fd);
    throw_if_given_up(given_up);
    if (met) return -1;
    poll(nullptr, 0, kLook);  // there is no event for the start of a peer's listener
  }
}

}  // namespace

std::string text(const Header& header) {
  constexpr std::array kNames{"ncclSend/ncclRecv", "ncclAllReduce", "ncclAllGather",
                              "ncclReduceScatter", "ncclBroadcast"};
  return std::string(kNames[static_cast<size_t>(header.kind)]) + "(count " +
         std::to_string(header.count) + ", dtype " +
         std::to_string(static_cast<int>(header.dtype)) + ", op " +
         std::to_string(static_cast<int>(header.op)) + ", root " + std::to_string(header.root) +
         ")";
}

namespace {

// Of this process.
struct Order {
  Lock mutex;
  std::map<std::pair<Place, Place>, Launched> last;
  std::set<uint64_t> ended;
};
// Never destroyed: streams may outlive main(). Made before it, as the state of runtime.cpp.
Order& all_order = *new Order;
Order& order() { return all_order; }

bool in_order(const Launched& mine, const Launched& theirs) {
  const std::lock_guard lock(order().mutex);
  const auto& ended = order().ended;
  return mine == theirs || ended.contains(mine.communicator) || ended.contains(theirs.communicator);
}

}  // namespace

Launched exchange_last(Place mine, Place theirs, Launched now) {
  const std::lock_guard lock(order().mutex);
  return std::exchange(order().last[{mine, theirs}], now);
}

void forget_order(uint64_t communicator) {
  const std::lock_guard lock(order().mutex);
  order().ended.insert(communicator);
}

namespace {

// System calls: a thread that found the connection complete may close what the connecting thread
// opened, and ThreadSanitizer does not see the lock that orders them.
void close_all(std::vector<int>& side) {
  for (const int fd : side)
    if (fd >= 0) syscall(SYS_close, fd);
  side.clear();
}

}  // namespace

Wires::~Wires() {
  hang_up();
  end_meetings();
}

void Wires::hang_up() {
  close_all(out_);
  close_all(in_);
}

void Wires::end_meetings() {
  close_all(meet_out_);
  close_all(meet_in_);
}

void Wires::connect(const pycomm::nccl::NcclId& id, int device,
                    const std::function<bool()>& given_up) {
  out_.assign(static_cast<size_t>(size_), -1);
  meet_out_ = meet_in_ = in_ = out_;
  places_.resize(static_cast<size_t>(size_));
  met_.resize(static_cast<size_t>(size_));
  sockaddr_un at;
  const struct Listener {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ~Listener() { ::close(fd); }
  } listener;
  socklen_t length = address(at, id, rank_);
  if (bind(listener.fd, reinterpret_cast<sockaddr*>(&at), length) != 0 ||
      listen(listener.fd, 2 * size_) != 0)
    throw Failed(NcclResult::invalid_usage, "rank " + std::to_string(rank_) + " is there twice");
  Hello mine{rank_, size_, device, getpid(), false};
  bool gone = false;  // a peer failed; what it sent before may tell why
  for (auto* const side : {&out_, &meet_out_}) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      length = address(at, id, peer);
      const int fd = call(at, length, side == &meet_out_, given_up);
      gone = gone || fd < 0;
      if (fd >= 0) whole((*side)[static_cast<size_t>(peer)] = fd, mine, true);
    }
    mine.for_meet = true;
  }
  std::set<int> devices{device};
  std::string twice;  // as NCCL's, this error waits until all ranks are there
  for (int accepted = 0; accepted < 2 * (size_ - 1); ++accepted) {
    pollfd door{listener.fd, POLLIN, 0};
    while (poll(&door, 1, kLook) == 0) {
      throw_if_given_up(given_up);
      if (gone) throw Failed(NcclResult::remote_error, "a peer failed to connect");
    }
    const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
    Hello theirs{};
    whole(fd, theirs, false);
    (theirs.for_meet ? meet_in_ : in_)[static_cast<size_t>(theirs.rank)] = fd;
    places_[static_cast<size_t>(theirs.rank)] = {theirs.process, theirs.device};
    if (theirs.size != size_)
      throw Failed(NcclResult::invalid_argument, "ranks disagree about the communicator's size");
    if (!theirs.for_meet && !devices.insert(theirs.device).second)
      twice = "Duplicate GPU detected: device " + std::to_string(theirs.device);
  }
  if (!twice.empty()) throw Failed(NcclResult::invalid_usage, twice);
}

// System calls: ThreadSanitizer would take send() and recv() for an order of threads.
void Wires::meet(const std::set<int>& peers, bool for_messages,
                 const std::function<bool()>& given_up) {
  const auto gone = [](int peer) {
    return Failed(NcclResult::remote_error, "rank " + std::to_string(peer) + " has gone");
  };
  throw_if_given_up(given_up);
  const char mine = static_cast<char>(for_messages);
  for (const int peer : peers) {
    const auto at = static_cast<size_t>(peer);
    if (std::exchange(met_.at(at)[for_messages].sent, true)) continue;
    if (syscall(SYS_sendto, meet_out_.at(at), &mine, 1, MSG_NOSIGNAL, nullptr, 0) != 1)
      throw gone(peer);
  }
  for (const int peer : peers) {
    const auto at = static_cast<size_t>(peer);
    while (!met_.at(at)[for_messages].received) {
      pollfd door{meet_in_.at(at), POLLIN, 0};
      while (poll(&door, 1, kLook) == 0) throw_if_given_up(given_up);
      char theirs = 0;
      if (syscall(SYS_recvfrom, door.fd, &theirs, 1, 0, nullptr, nullptr) != 1) throw gone(peer);
      met_[at].at(static_cast<size_t>(theirs)).received = true;
    }
  }
}

// Moves some bytes of this stage; true when all have moved.
bool Transfer::move(int fd, void* at, size_t bytes, bool out) {
  while (done_ < bytes) {
    auto* p = static_cast<std::byte*>(at) + done_;
    const ssize_t n = out ? send(fd, p, bytes - done_, MSG_DONTWAIT | MSG_NOSIGNAL)
                          : recv(fd, p, bytes - done_, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0)
      throw Failed(NcclResult::remote_error, "rank " + std::to_string(peer_) + " has gone");
    done_ += static_cast<size_t>(n);
  }
  done_ = 0;
  return true;
}

void Transfer::judge(const Wires& wires) {
  const bool ordered = in_order(header_.before, seen_.before);
  seen_.before = header_.before;
  answer_ = !ordered ? kOrder : seen_ == header_ ? kYes : kMismatch;
  if (answer_ == kYes) return;
  const int fd = wires.in_[static_cast<size_t>(peer_)];
  (void)send(fd, &answer_, 1, MSG_DONTWAIT | MSG_NOSIGNAL);  // a byte always fits here
  refused(wires, ", which has " + text(seen_));
}

// The error that both sides of a refused message get.
void Transfer::refused(const Wires& wires, const std::string& theirs) const {
  const std::string peer = "rank " + std::to_string(peer_);
  const std::string mine = "rank " + std::to_string(wires.rank());
  throw Failed(
      NcclResult::invalid_usage,
      answer_ == kOrder
          ? peer + " and " + mine +
                " enqueued calls of several communicators in different orders, of which "
                "one is " +
                text(header_)
          : "mismatch: " + mine + " has " + text(header_) + ", another call than " + peer + theirs);
}

bool Transfer::step(Wires& wires) {
  const int fd = (sends_ ? wires.out_ : wires.in_).at(static_cast<size_t>(peer_));
  if (stage_ == Stage::header) {
    if (!move(fd, sends_ ? &header_ : &seen_, sizeof header_, sends_)) return false;
    if (!sends_) judge(wires);
    stage_ = Stage::answer;
  }
  if (stage_ == Stage::answer) {
    if (!move(fd, &answer_, 1, !sends_)) return false;
    if (answer_ != kYes) refused(wires, "");
    stage_ = Stage::payload;
    if (sends_) emulator::device_reads(data_, bytes_);
  }
  if (stage_ == Stage::payload && move(fd, data_, bytes_, sends_)) {
    stage_ = Stage::over;
    if (!sends_) emulator::device_writes(data_, bytes_);
  }
  return stage_ == Stage::over;
}

}  // namespace fake_nccl
