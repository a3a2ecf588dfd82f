// The guarantees of every transport (transport/transport.h), checked on all of them; and the
// memory that shm refuses from a peer.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/errors.h"
#include "harness.h"
#include "os/shared_memory.h"
#include "os/socket.h"
#include "ranks.h"
#include "testing/faulty.h"
#include "testing/rate_limited.h"
#include "transport/encrypted.h"
#include "transport/local.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace {

using namespace pycomm;
using namespace ranks;
using namespace pycomm::os;
using namespace pycomm::testing;
using namespace pycomm::transport;
using namespace std::chrono_literals;
using Buffer = std::vector<std::byte>;

constexpr size_t kRing = size_t{128} << 10;
constexpr size_t kPeekBytes = size_t{64} << 10;  // the guarantee of peek()
using Pair = Ends;

// Both ends with a fault from the first byte on.
Pair faulty_pair(const std::string& transport, const Fault& fault) {
  Pair pair = channel_pair(transport, kRing);
  pair.a = make_faulty(std::move(pair.a), 1, make_faults({fault}));
  pair.b = make_faulty(std::move(pair.b), 0, make_faults({fault}));
  return pair;
}

// Each end behind a rate-limited link, slow enough that much of a test waits for it.
Pair throttled_pair(const std::string& transport) {
  Pair pair = channel_pair(transport, kRing);
  pair.a = make_rate_limited(std::move(pair.a), std::make_shared<RateLimitedLink>(100e6));
  pair.b = make_rate_limited(std::move(pair.b), std::make_shared<RateLimitedLink>(100e6));
  return pair;
}

// With keys that change often.
Pair encrypted_pair() {
  Pair pair = channel_pair("tcp", kRing);
  pair.a = make_encrypted(std::move(pair.a), {"a secret", true, 3});
  pair.b = make_encrypted(std::move(pair.b), {"a secret", false, 3});
  return pair;
}

// One test for each transport: plain, encrypted, behind rate-limited links, and with faults that
// lose nothing.
struct Conformance {
  Conformance(const std::string& name, void (*body)(Pair)) {
    for (const std::string& transport : kTransports)
      Test(transport + ": " + name, [=] { body(channel_pair(transport, kRing)); });
    Test("encrypted tcp: " + name, [=] { body(encrypted_pair()); });
    for (const std::string transport : {"shm", "tcp"}) {
      Test("throttled " + transport + ": " + name, [=] { body(throttled_pair(transport)); });
      Test("late " + transport + ": " + name,
           [=] { body(faulty_pair(transport, {.action = FaultAction::delay, .delay = 20us})); });
      const Fault slow{.action = FaultAction::throttle, .chunk_bytes = 997};
      Test("trickling " + transport + ": " + name, [=] { body(faulty_pair(transport, slow)); });
    }
  }
};

// Sleeps in poll(2) until `progress` is true, as an engine does; a wake-up that is lost fails.
// `progress` must run until nothing moves: there is no wake-up for bytes that it left unread.
void sleep_until(Channel& channel, Want want, const std::function<bool()>& progress) {
  while (!progress()) {
    pollfd armed = channel.arm(want);
    const bool came = progress();
    const int woken = came ? 1 : ::poll(&armed, 1, 10'000);
    channel.disarm(came ? short{0} : armed.revents);
    expect(woken > 0, "a wake-up was lost");
    if (came) return;
  }
}

// Byte `i` of the stream `stream`.
std::byte byte_at(uint64_t i, uint64_t stream) {
  return static_cast<std::byte>(((i + stream * 77) * 0x9E3779B97F4A7C15u) >> 56);
}

Buffer make_bytes(uint64_t from, size_t bytes, uint64_t stream) {
  Buffer buffer(bytes);
  for (size_t i = 0; i < bytes; ++i) buffer[i] = byte_at(from + i, stream);
  return buffer;
}

void expect_bytes(ConstBytes got, uint64_t from, uint64_t stream) {
  for (size_t i = 0; i < got.size(); ++i)
    if (got[i] != byte_at(from + i, stream))
      expect(false, "byte " + std::to_string(from + i) + " of the stream is wrong");
}

// Sends everything.
void send_all(Channel& channel, ConstBytes bytes) {
  sleep_until(channel, {.send = true}, [&] {
    for (size_t n = 1; n > 0 && !bytes.empty(); bytes = bytes.subspan(n))
      n = channel.send({}, bytes);
    return bytes.empty();
  });
}

Buffer receive_all(Channel& channel, size_t bytes) {
  Buffer buffer(bytes);
  size_t have = 0;
  sleep_until(channel, {.receive = true}, [&] {
    for (size_t n = 1; n > 0 && have < bytes; have += n)
      n = channel.receive(Bytes(buffer).subspan(have));
    return have == bytes;
  });
  return buffer;
}

// One end of a conversation: random sizes in both directions at once, head and body, and every way
// to receive.
class Talker {
 public:
  Talker(Channel& channel, uint64_t total, uint64_t mine, uint64_t theirs)
      : channel_(channel), total_(total), mine_(mine), theirs_(theirs), random_(mine) {}

  void talk() {
    sleep_until(channel_, {.receive = true, .send = true}, [&] {
      while (send_some() + receive_some() > 0) {
      }
      return sent_ == total_ && received_ == total_;
    });
  }

 private:
  size_t below(size_t limit) { return random_() % limit; }
  size_t any_size() { return below(8) == 0 ? below(300'000) : below(5'000); }

  size_t send_some() {
    if (pending_.empty()) {
      pending_ = make_bytes(sent_, std::min<uint64_t>(total_ - sent_, any_size()), mine_);
      head_ = pending_.empty() ? 0 : below(std::min<size_t>(pending_.size(), 64) + 1);
    }
    const ConstBytes bytes = pending_;
    const size_t n = channel_.send(bytes.first(head_), bytes.subspan(head_));
    expect(n <= bytes.size(), "more was received than available");
    sent_ += n;
    head_ -= std::min(n, head_);
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(n));
    return n;
  }

  size_t receive_some() {
    const auto want = std::min<uint64_t>(total_ - received_, 1 + any_size());
    size_t n = 0;
    if (below(2) == 0) {
      const ConstBytes here = channel_.peek(want);
      expect(here.size() <= want, "more was shown than asked for");
      expect_bytes(here, received_, theirs_);
      n = here.empty() ? 0 : 1 + below(here.size());
      channel_.take(n);
    } else {
      Buffer into(want);
      n = channel_.receive(into);
      expect_bytes(ConstBytes(into).first(n), received_, theirs_);
    }
    received_ += n;
    return n;
  }

  Channel& channel_;
  uint64_t total_, mine_, theirs_;
  std::mt19937_64 random_;
  uint64_t sent_ = 0, received_ = 0;
  Buffer pending_;
  size_t head_ = 0;
};

const Conformance kTalks("all bytes arrive, in order, both ways at once", [](Pair pair) {
  run(2, [&](int rank) {
    Talker(rank == 0 ? *pair.a : *pair.b, 3'000'000, 1 + rank, 2 - rank).talk();
  });
});

const Conformance kShows(
    "peek shows at least 64 KiB of the sent bytes, at any offset", [](Pair pair) {
      uint64_t sent = 0, taken = 0;
      for (const size_t take : {size_t{1}, size_t{4095}, size_t{32}, kPeekBytes, size_t{70'001}}) {
        const Buffer more = make_bytes(sent, 100'000 - (sent - taken), 3);
        send_all(*pair.a, more);
        sent += more.size();
        for (const size_t want :
             {size_t{1}, size_t{32}, size_t{5000}, kPeekBytes, size_t{90'000}}) {
          ConstBytes here;
          sleep_until(*pair.b, {.receive = true}, [&] {
            here = pair.b->peek(want);
            return here.size() >= std::min(want, kPeekBytes);
          });
          expect(here.size() <= want, "more was shown than asked for");
          expect_bytes(here, taken, 3);
        }
        Buffer some(take / 2);
        sleep_until(*pair.b, {.receive = true}, [&] { return !pair.b->peek(1).empty(); });
        const size_t first = pair.b->receive(some);
        expect_bytes(ConstBytes(some).first(first), taken, 3);
        const size_t rest = pair.b->peek(take - first).size();
        pair.b->take(rest);
        taken += first + rest;
      }
    });

const Conformance kWakes("no wake-up is lost", [](Pair pair) {
  run(2, [&](int rank) {
    Channel& mine = rank == 0 ? *pair.a : *pair.b;
    for (int i = 0; i < 10'000; ++i) {
      const Buffer ball = make_bytes(static_cast<uint64_t>(i), 1, 0);
      if (rank == 0) send_all(mine, ball);
      expect(receive_all(mine, 1) == ball, "another ball came back");
      if (rank == 1) send_all(mine, ball);
    }
  });
});

const Conformance kWakesWriters("no wake-up of a writer is lost", [](Pair pair) {
  constexpr size_t kBytes = size_t{16} << 20;
  run(2, [&](int rank) {
    const Buffer block(size_t{1} << 20);
    for (size_t i = 0; i < kBytes; i += block.size()) {
      if (rank == 0) send_all(*pair.a, block);
      if (rank == 1) expect(receive_all(*pair.b, block.size()) == block, "a block is wrong");
    }
  });
});

const Conformance kEmpty("nothing arrives before a send", [](Pair pair) {
  expect(pair.a->peek(1).empty(), "something to peek at");
  Buffer into(64);
  expect_equal(pair.a->receive(into), size_t{0}, "bytes received");
  expect(!pair.a->is_closed() && !pair.b->is_closed(), "closed");
  expect_equal(pair.a->send({}, {}), size_t{0}, "bytes of nothing");
  pollfd armed = pair.a->arm({.receive = true});
  expect_equal(::poll(&armed, 1, 0), 0, "events without a cause");
  pair.a->disarm(0);
});

void expect_last_words(Pair& pair, const std::function<void()>& end) {
  const Buffer words = make_bytes(0, 50'000, 4);
  send_all(*pair.a, words);
  end();
  sleep_until(*pair.b, {}, [&] { return pair.b->is_closed(); });
  expect(receive_all(*pair.b, words.size()) == words, "bytes sent before are missing");
  expect(pair.b->peek(1).empty(), "more arrived than was sent");
  expect_equal(pair.b->send(words, words), 2 * words.size(), "bytes swallowed");
}

const Conformance kHangsUp("the peer sees a close, after all sent bytes",
                           [](Pair pair) { expect_last_words(pair, [&] { pair.a->close({}); }); });

const Conformance kHangsUpForked(
    "the peer sees a close although a forked process has the descriptor", [](Pair pair) {
      const Fd childs(::dup(pair.a->arm({}).fd));
      pair.a->disarm(0);
      expect_last_words(pair, [&] { pair.a->close({}); });
    });

const Conformance kDies("the peer sees a destroyed channel, after all sent bytes",
                        [](Pair pair) { expect_last_words(pair, [&] { pair.a.reset(); }); });

// A TCP socket that is closed with unread bytes, or that receives later ones, is reset, and sent
// bytes that are not delivered yet would be lost.
const Conformance kUnread("all sent bytes arrive although the sender left the peer's bytes unread",
                          [](Pair pair) {
                            const Buffer block = make_bytes(0, size_t{1} << 20, 5);
                            uint64_t sent = 0;
                            for (size_t n = 1; n > 0; sent += n)
                              n = pair.a->send({}, ConstBytes(block).subspan(sent % block.size()));
                            send_all(*pair.b, make_bytes(0, 1000, 6));
                            pair.a->close({});
                            pair.b->send({}, make_bytes(0, 1000, 6));
                            pair.a.reset();
                            Buffer all(sent);
                            uint64_t got = 0;
                            for (const Deadline deadline(10s); got < sent && !deadline.expired();)
                              got += pair.b->receive(Bytes(all).subspan(got));
                            expect_equal(got, sent, "bytes that arrived");
                            for (uint64_t i = 0; i < sent; ++i)
                              if (all[i] != block[i % block.size()])
                                expect(false, "byte " + std::to_string(i));
                          });

// The peer reads after the sender has closed; before that it may have been woken without end.
const Conformance kOwed("a goodbye message arrives behind a full connection", [](Pair pair) {
  const Buffer block = make_bytes(0, size_t{1} << 16, 5);
  Buffer want, words = make_bytes(0, 70'000, 6);
  for (size_t n = 1; n > 0;) {
    n = pair.a->send({}, block);
    if (n > 0) words[0] = block[n % block.size()];  // bytes that were not accepted are sent first
    want.insert(want.end(), block.begin(), block.begin() + static_cast<std::ptrdiff_t>(n));
  }
  for (int i = 0; i < 10'000; ++i) pair.a->wake_peer();
  pair.a->close(words);
  pair.a.reset();
  want.insert(want.end(), words.begin(), words.end());
  Buffer all(want.size());
  size_t got = 0;
  const auto receive = [&] { return pair.b->receive(Bytes(all).subspan(got)); };
  got = receive();  // before its end is seen, and after
  sleep_until(*pair.b, {.receive = true}, [&] {
    got += receive();
    return pair.b->is_closed();
  });
  const size_t last = std::min<size_t>(all.size() - got, 64 << 10);
  expect_equal(pair.b->peek(last).size(), last, "bytes in one run");
  for (size_t n = 1; n > 0; got += n) n = receive();
  expect_equal(got, all.size(), "bytes that arrived");
  expect(all == want, "the message differs");
  expect(pair.b->peek(1).empty(), "more arrived than was sent");
});

// A reader that sees that the peer has left, and then less than a frame, takes the rest for lost.
void expect_all_once_closed(const std::string& transport, size_t before,
                            const std::function<size_t(Channel&, Bytes)>& get) {
  Pair pair = channel_pair(transport, kRing);
  const auto line = std::make_shared<RateLimitedLink>(1e-6);
  pair.b = make_rate_limited(std::move(pair.b), line);
  line->in.take(line->in.available() - before);
  send_all(*pair.a, make_bytes(0, 1000, 7));
  Buffer into(1000);
  if (before > 0)
    sleep_until(*pair.b, {.receive = true}, [&] { return get(*pair.b, into) == before; });
  pair.a->close({});
  sleep_until(*pair.b, {}, [&] { return pair.b->is_closed(); });
  const size_t n = get(*pair.b, into);
  expect(n == 1000 || n == 1000 - before, "the link holds bytes back");
  expect_bytes(ConstBytes(into).first(n), 1000 - n, 7);
}

const ByTransport kLeft("a link holds nothing back once the peer has left",
                        [](const std::string& transport) {
                          const auto receive = [](Channel& channel, Bytes into) {
                            return channel.receive(into);
                          };
                          const auto peek = [](Channel& channel, Bytes into) {
                            const ConstBytes there = channel.peek(into.size());
                            std::copy(there.begin(), there.end(), into.begin());
                            return there.size();
                          };
                          for (const size_t before : {0, 1, 999}) {
                            expect_all_once_closed(transport, before, receive);
                            expect_all_once_closed(transport, before, peek);
                          }
                        });

const Conformance kFull("a writer whose peer dies does not hang", [](Pair pair) {
  const Buffer block(size_t{1} << 20);
  while (pair.a->send({}, block) > 0) {
  }
  std::thread peer([&] { pair.b.reset(); });
  sleep_until(*pair.a, {.send = true}, [&] { return pair.a->is_closed(); });
  peer.join();
  for (int i = 0; i < 100; ++i)
    expect_equal(pair.a->send(block, block), 2 * block.size(), "bytes swallowed");
});

const Conformance kWakesAtTheEnd("a close wakes a peer that sleeps only for that", [](Pair pair) {
  std::thread peer([&] { pair.b->close({}); });
  sleep_until(*pair.a, {}, [&] { return pair.a->is_closed(); });
  peer.join();
});

// Sends one byte and perhaps descriptors, as an offer of shared memory.
void pass(int socket, const std::vector<int>& fds) {
  char byte = 0;
  iovec data{&byte, 1};
  const size_t bytes = fds.size() * sizeof(int);
  alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(head), fds.data(), bytes);
  }
  expect_equal(::sendmsg(socket, &message, MSG_NOSIGNAL), ssize_t{1}, "bytes passed");
}

Fd unsealed_memory(size_t bytes) {
  Fd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  expect_equal(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0, "ftruncate");
  return fd;
}

// The outcome of an offer in shm.
template <typename Wanted>
void expect_offer_refused(const std::function<void(Fd&)>& offer) {
  std::string why;
  const auto transport = make_shm(kRing, page_bytes(), why);
  expect(transport != nullptr, why);
  int ends[2];
  expect_equal(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0, "socketpair");
  Fd mine(ends[0]), theirs(ends[1]);
  transport->send_memory(mine.get());
  offer(theirs);
  expect_throws<Wanted>([&] { transport->accept(std::move(mine), Deadline(200ms)); });
}

// Needs root: this process takes another user id for a moment.
const Test kUsers("shm passes no memory to a process of another user", [] {
  if (::geteuid() != 0) return;
  std::string why;
  const auto transport = make_shm(kRing, page_bytes(), why);
  expect(transport != nullptr, why);
  int ends[2];
  expect_equal(::seteuid(65534), 0, "seteuid");
  const int made = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends);
  expect_equal(::seteuid(0), 0, "seteuid");
  expect_equal(made, 0, "socketpair");
  const Fd mine(ends[0]), theirs(ends[1]);
  expect_throws<PeerLost>([&] { transport->send_memory(mine.get()); });
  expect_equal(poll_one(theirs.get(), POLLIN, 0ns), short{0}, "passed descriptors");
});

const Test kRefuses("shm refuses memory other than agreed", [] {
  const size_t page = page_bytes(), ring = RingMemory::file_bytes(kRing);
  const Fd right_ring = make_shared_memory(ring), right_page = make_shared_memory(page);
  const auto refused = [](int offered_ring, int offered_page) {
    expect_offer_refused<PeerLost>(
        [&](Fd& peer) { pass(peer.get(), {offered_ring, offered_page}); });
  };
  for (const size_t wrong : {ring - page, ring + page, size_t{0}})
    refused(make_shared_memory(wrong).get(), right_page.get());
  for (const size_t wrong : {2 * page, size_t{0}})
    refused(right_ring.get(), make_shared_memory(wrong).get());
  refused(unsealed_memory(ring).get(), right_page.get());
  refused(right_ring.get(), unsealed_memory(page).get());
  expect_offer_refused<PeerLost>([&](Fd& peer) { pass(peer.get(), {peer.get(), peer.get()}); });
  expect_offer_refused<PeerLost>([&](Fd& peer) { pass(peer.get(), {right_ring.get()}); });
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = open_files();
  expect_offer_refused<PeerLost>([&](Fd& peer) {
    const int one = right_ring.get();
    pass(peer.get(), {one, right_page.get(), one, one});
  });
  expect_equal(open_files(), before, "open descriptors after one too many was passed");
  expect_offer_refused<PeerLost>([&](Fd& peer) { pass(peer.get(), {}); });
  expect_offer_refused<PeerLost>([&](Fd& peer) { peer.reset(); });
  expect_offer_refused<Timeout>([&](Fd&) {});
});

const Test kAlone(
    "local: an end without a peer closes with the other, and a late rank sees it", [] {
      const long before = descriptors();
      for (int i = 0; i < 2000; ++i) {
        const std::string meeting = "alone " + std::to_string(i);
        auto first = local_channel(meeting, 3, 1, kRing);
        expect_equal(descriptors() - before, 2L, "descriptors of both ends");
        expect_throws<InternalError>([&] { (void)local_channel(meeting, 3, 1, kRing); });
        first.reset();
        expect_equal(descriptors(), before, "descriptors");
        if (i % 100 != 0) continue;
        auto late = local_channel(meeting, 1, 3, kRing);
        std::byte byte{};
        expect_equal(late->receive({&byte, 1}), size_t{0}, "bytes");
        pollfd armed = late->arm({.receive = true});
        ::poll(&armed, 1, 0);
        late->disarm(armed.revents);
        expect(late->is_closed(), "the other has closed");
      }
      auto first = local_channel("both", 0, 1, kRing), second = local_channel("both", 1, 0, kRing);
      first.reset();
      expect_equal(descriptors() - before, 1L, "the end that was taken stays");
    });

}  // namespace
