#include "transport/shm.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "core/errors.h"
#include "os/random.h"
#include "os/shared_memory.h"
#include "os/socket.h"
#include "transport/ring_channel.h"

namespace pycomm::transport {
namespace {

std::string not_our_user(uint32_t user) {
  return "it runs as user " + std::to_string(user) + ", this rank as user " +
         std::to_string(::geteuid()) + ": shared memory requires one user for all ranks of a host";
}

// A message of one byte with descriptors: the ring that its sender reads, the sender's shared
// memory segment, and its heap if it has one.
constexpr size_t kLeastFds = 2, kMostFds = 3;

struct DescriptorMessage {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))] = {};
  msghdr message{};

  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;
};

void send_descriptors(int socket, std::span<const int> fds) {
  DescriptorMessage passed;
  cmsghdr* head = CMSG_FIRSTHDR(&passed.message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(fds.size_bytes());
  passed.message.msg_controllen = CMSG_SPACE(fds.size_bytes());
  std::memcpy(CMSG_DATA(head), fds.data(), fds.size_bytes());
  // The death of the peer is detected by accept().
  if (::sendmsg(socket, &passed.message, MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET)
    os::throw_errno("passing shared memory to a peer");
}

// In the order above; the last one is empty if the sender has no heap.
std::array<os::Fd, kMostFds> receive_descriptors(int socket, const Deadline& deadline) {
  DescriptorMessage passed;
  for (;;) {
    const auto n = ::recvmsg(socket, &passed.message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n == 0) throw PeerLost("it closed the connection during its setup");
    if (n > 0) break;
    if (errno != EAGAIN && errno != EINTR)
      throw PeerLost("the connection failed during its setup: " + os::error_text(errno));
    if (deadline.expired()) throw Timeout("it connected but sent no shared memory");
    pollfd wait{socket, POLLIN, 0};
    ::poll(&wait, 1, 100);
  }
  const cmsghdr* head = CMSG_FIRSTHDR(&passed.message);
  std::array<os::Fd, kMostFds> fds;
  const bool has_fds = head != nullptr && head->cmsg_type == SCM_RIGHTS;
  const size_t count = has_fds ? (head->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
  for (size_t i = 0; i < count; ++i) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
    os::Fd one(fd);  // closes those beyond kMostFds
    if (i < kMostFds) fds[i] = std::move(one);
  }
  // The kernel drops the descriptors for which this process has no number left.
  if (count < kMostFds && (passed.message.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    os::throw_errno("receiving a peer's shared memory");
  }
  if (count < kLeastFds || count > kMostFds)
    throw PeerLost("invalid shared memory: it sent " + std::to_string(count) +
                   " descriptors, expected 2 or 3");
  return fds;
}

class Shm final : public SocketTransport {
 public:
  Shm(size_t ring_bytes, size_t memory_bytes, std::shared_ptr<os::SharedHeap> heap)
      : ring_bytes_(ring_bytes),
        heap_(std::move(heap)),
        memory_bytes_(memory_bytes),
        memory_(os::make_shared_memory(memory_bytes)),
        mapped_(os::map_shared_memory(memory_.get(), memory_bytes)),
        address_("pycomm-" + os::random_name()),
        listener_(os::listen_on(os::abstract_unix_address(address_))) {}

  std::string_view name() const override { return "shm"; }
  const std::string& address() const override { return address_; }
  std::vector<int> listeners() const override { return {listener_.get()}; }
  std::vector<std::string> candidates(const std::string& address, bool) const override {
    return {address};
  }
  os::Fd start_connect(const std::string& address) const override {
    return os::start_connect(os::abstract_unix_address(address));
  }

  // Each side creates the ring that it reads and passes it to the other, which writes it. Both
  // sides check the user first, because the memory is writable.
  void send_memory(int fd) override {
    if (uint32_t user = 0; !os::is_our_user(fd, user)) throw PeerLost(not_our_user(user));
    os::Fd memory = os::make_shared_memory(os::RingMemory::file_bytes(ring_bytes_));
    const std::array<int, kMostFds> fds{memory.get(), memory_.get(),
                                        heap_ ? heap_->descriptor() : -1};
    send_descriptors(fd, std::span(fds).first(heap_ ? kMostFds : kLeastFds));
    sent_memory_[fd] = std::move(memory);
  }

  bool exchanges() const override { return true; }

  std::unique_ptr<Channel> accept(os::Fd fd, const Deadline& deadline) override {
    auto mine = sent_memory_.extract(fd.get());
    check(!mine.empty(), "accept() was called without send_memory()");
    const auto [theirs, memory, heap] = receive_descriptors(fd.get(), deadline);
    if (!os::is_shared_memory(theirs.get(), os::RingMemory::file_bytes(ring_bytes_)) ||
        !os::is_shared_memory(memory.get(), memory_bytes_))
      throw PeerLost("invalid shared memory: it is not sealed or has a different size");
    auto in = std::make_shared<os::RingMemory>(mine.mapped().get(), ring_bytes_);
    auto out = std::make_shared<os::RingMemory>(theirs.get(), ring_bytes_);
    PeerMemory peer_memory{os::map_shared_memory(memory.get(), memory_bytes_), {}};
    if (heap_ && os::is_shared_memory(heap.get(), heap_->view().bytes))
      peer_memory.heap = os::map_heap(heap.get(), heap_->view().bytes);
    return std::make_unique<RingChannel>("shm", std::move(in), std::move(out), std::move(fd),
                                         std::move(peer_memory));
  }

  std::shared_ptr<std::byte> memory() const override { return mapped_; }

 private:
  size_t ring_bytes_;
  std::shared_ptr<os::SharedHeap> heap_;
  size_t memory_bytes_;
  os::Fd memory_;
  std::shared_ptr<std::byte> mapped_;
  std::string address_;
  os::Fd listener_;
  std::map<int, os::Fd> sent_memory_;
};

}  // namespace

std::unique_ptr<SocketTransport> make_shm(size_t ring_bytes, size_t memory_bytes, std::string& why,
                                          std::shared_ptr<os::SharedHeap> heap) {
  try {
    return std::make_unique<Shm>(ring_bytes, memory_bytes, std::move(heap));
  } catch (const Error& error) {
    why = error.what();
    return nullptr;
  }
}

}  // namespace pycomm::transport
