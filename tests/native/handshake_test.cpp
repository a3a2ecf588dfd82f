// The proof of the shared secret: its arithmetic against published vectors, and the handshake
// against ends with a wrong secret, false or repeated bytes, silence or a close.
#include "transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/sha256.h"
#include "harness.h"
#include "os/interfaces.h"
#include "os/socket.h"

using namespace pycomm;
using namespace pycomm::os;
using namespace pycomm::transport;
using namespace std::chrono_literals;

namespace {

using Role = Handshake::Role;
using Step = Handshake::Step;

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest)
    for (const int nibble : {byte >> 4, byte & 15}) text.push_back("0123456789abcdef"[nibble]);
  return text;
}

std::pair<Fd, Fd> socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0)
    throw_errno("making a pair of sockets");
  return {Fd(fds[0]), Fd(fds[1])};
}

bool is_over(Step step) { return step == Step::done || step == Step::refused; }

// Runs `shake` to its end, waiting for its socket.
Step finish(Handshake& shake) {
  const Deadline deadline(10s);
  Step step = shake.advance();
  for (; !is_over(step) && !deadline.expired(); step = shake.advance())
    poll_one(shake.fd(), step == Step::want_read ? POLLIN : POLLOUT,
             std::min(deadline.left(), shake.deadline().left()));
  expect(is_over(step), "the handshake does not end");
  return step;
}

// A filter between the two ends: gets each byte, its direction and its place in the stream; it may
// change the byte, and closes the connection by returning false.
using Middle = std::function<bool(bool from_connector, size_t place, char& byte)>;

struct Wire {
  Wire() {
    std::tie(connector_end, left) = socket_pair();
    std::tie(listener_end, right) = socket_pair();
  }
  // Forwards what has arrived; false when nothing moved.
  bool carry(const Middle& middle) {
    const bool one = carry_from(left, right, true, middle);
    const bool other = carry_from(right, left, false, middle);
    return one || other;
  }
  Fd connector_end, listener_end;

 private:
  bool carry_from(Fd& source, Fd& sink, bool from_connector, const Middle& middle) {
    bool moved = false;
    char byte = 0;
    while (source && ::recv(source.get(), &byte, 1, 0) == 1) {
      moved = true;
      if (middle(from_connector, places_[from_connector]++, byte)) {
        ::send(sink.get(), &byte, 1, MSG_NOSIGNAL);
      } else {
        left.reset();
        right.reset();
      }
    }
    return moved;
  }
  Fd left, right;
  std::array<size_t, 2> places_{};
};

struct Outcome {
  Step connector, listener;
  std::string connector_why, listener_why;
  int connector_peer, listener_peer;
};

struct End {
  std::string key;
  HandshakeParams params;
};

const End kConnector{"the key", {"world/1", 3, 5}}, kListener{"the key", {"world/1", 5, -1}};

Outcome converse(
    const End& a, const End& b, const Middle& middle = [](bool, size_t, char&) { return true; }) {
  Wire wire;
  Handshake connector(std::move(wire.connector_end), Role::connector, a.key, a.params, 10s);
  Handshake listener(std::move(wire.listener_end), Role::listener, b.key, b.params, 10s);
  const Deadline deadline(10s);
  Step left{}, right{};
  do {
    left = connector.advance();
    right = listener.advance();
    const bool moved = wire.carry(middle);
    // An end that refused has closed: the filter closes the other's, as a network would.
    if (!moved && is_over(left) != is_over(right)) wire = Wire();
  } while (!(is_over(left) && is_over(right)) && !deadline.expired());
  return {left, right, connector.why(), listener.why(), connector.peer(), listener.peer()};
}

constexpr size_t kFromConnector = 68, kFromListener = 69;  // bytes of a whole handshake

const Test kSha("sha256 gives the digests of FIPS 180-4", [] {
  expect_equal(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
               "nothing");
  expect_equal(hex(sha256("abc")),
               "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "abc");
  expect_equal(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
               "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", "56 bytes");
  expect_equal(hex(sha256(std::string(1'000'000, 'a'))),
               "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", "a million a");
});

const Test kHmac("hmac gives the digests of RFC 4231", [] {
  expect_equal(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
               "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", "case 1");
  expect_equal(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
               "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843", "case 2");
  expect_equal(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
               "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe", "case 3");
  // From Python, with a key as long as that of a run: at most a block is not hashed.
  expect_equal(hex(hmac_sha256(std::string(64, '\xaa'), "A key of exactly one block")),
               "2c704478485b26a2c6cac8fdeec0f6b4d5395bef4231c7d4099290fb055c5a00", "64");
  expect_equal(hex(hmac_sha256(std::string(131, '\xaa'),
                               "Test Using Larger Than Block-Size Key - Hash Key First")),
               "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54", "case 6");
  expect_equal(hex(hmac_sha256(std::string(131, '\xaa'),
                               "This is a test using a larger than block-size key and a larger "
                               "than block-size data. The key needs to be hashed before being "
                               "used by the HMAC algorithm.")),
               "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2", "case 7");
});

const Test kEqual("two digests are equal when every bit is", [] {
  const Digest digest = sha256("abc");
  expect(equal_in_constant_time(digest, digest), "the same");
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest other = digest;
    other[bit / 8] = static_cast<uint8_t>(other[bit / 8] ^ (1 << (bit % 8)));
    expect(!equal_in_constant_time(digest, other), "bit " + std::to_string(bit));
  }
});

const Test kGood("handshake: a holder of the secret is accepted and identified by rank", [] {
  const Outcome outcome = converse(kConnector, kListener);
  expect(outcome.connector == Step::done && outcome.listener == Step::done,
         outcome.connector_why + outcome.listener_why);
  expect_equal(outcome.connector_peer, 5, "the rank that the connector reached");
  expect_equal(outcome.listener_peer, 3, "the rank that the listener accepted");
});

const Test kWrong("handshake: a wrong secret, context or rank is refused at both ends", [] {
  struct Case {
    End connector, listener;
    std::string says;
  };
  const Case cases[] = {
      {{"a guess", {"world/1", 3, 5}}, kListener, "does not hold the same key"},
      {{"the key", {"world/2", 3, 5}}, kListener, "another group"},
      {{"the key", {"world/1", 3, 4}}, kListener, "rank 5 answered where rank 4 was expected"},
      {kConnector, {"the key", {"world/1", 5, 2}}, "rank 3 connected where rank 2 was expected"},
  };
  for (const Case& wrong : cases) {
    const Outcome outcome = converse(wrong.connector, wrong.listener);
    expect(outcome.connector == Step::refused, "the connector must refuse: " + wrong.says);
    expect(outcome.listener == Step::refused, "the listener must refuse: " + wrong.says);
    expect_says(outcome.connector_why + "; " + outcome.listener_why, wrong.says);
  }
  expect_throws<InvalidArgument>(
      [] { Handshake(Fd(), Role::listener, "", kListener.params).advance(); });
});

const Test kAgreed(
    "handshake: ranks with different descriptions of the group refuse, and say so", [] {
      End connector = kConnector, listener = kListener;
      connector.params.agreed = std::string(32, 'a');
      listener.params.agreed = connector.params.agreed;
      const Outcome same = converse(connector, listener);
      expect(same.connector == Step::done && same.listener == Step::done, same.connector_why);
      listener.params.agreed[31] = 'b';
      const Outcome other = converse(connector, listener);
      expect(other.connector == Step::refused && other.listener == Step::refused, "let in");
      expect_says(other.connector_why, "different descriptions of the group");
      expect_says(other.listener_why, "different descriptions of the group");
      expect_equal(other.listener_peer, 3, "the rank that the listener names");
      connector.key = "a guess";  // no details for an end without the secret
      expect_says(converse(connector, listener).connector_why, "does not hold the same key");
    });

// Both ends refuse a conversation in which `pass` has spoilt a byte, or closed the connection in
// front of it; each byte in turn.
void expect_refusals(const std::function<bool(char& byte)>& pass) {
  for (const bool from_connector : {true, false})
    for (size_t at = 0; at < (from_connector ? kFromConnector : kFromListener); ++at) {
      const Outcome outcome =
          converse(kConnector, kListener, [&](bool from, size_t place, char& byte) {
            return from != from_connector || place != at || pass(byte);
          });
      expect(outcome.connector == Step::refused, "connector, byte " + std::to_string(at));
      const bool only_yes = !from_connector && at == kFromListener - 1;
      expect(only_yes || outcome.listener == Step::refused, "listener, byte " + std::to_string(at));
      expect(!outcome.connector_why.empty(), "a reason");
    }
}

const Test kChanged("handshake: no byte can be changed in transit", [] {
  expect_refusals([](char& byte) {
    byte = static_cast<char>(byte ^ 0x10);
    return true;
  });
});

const Test kCut("handshake: a connection closed at any byte is refused",
                [] { expect_refusals([](char&) { return false; }); });

const Test kReflection("handshake: a listener rejects its own proof", [] {
  auto [client, inside] = socket_pair();
  Handshake listener(std::move(inside), Role::listener, "the key", kListener.params, 10s);
  const std::string greeting(36, '\0');
  expect_equal(::send(client.get(), greeting.data(), greeting.size(), 0), 36, "sent");
  expect(listener.advance() == Step::want_read, "the listener answers a greeting");
  std::array<char, 68> answer{};
  expect_equal(::recv(client.get(), answer.data(), answer.size(), 0), 68, "answer");
  expect_equal(::send(client.get(), answer.data() + 36, 32, 0), 32, "sent back");
  expect(listener.advance() == Step::refused, "the reflected proof was accepted");
});

const Test kReplay("handshake: a replayed conversation is refused", [] {
  std::string said;
  converse(kConnector, kListener, [&](bool from_connector, size_t, const char& byte) {
    if (from_connector) said.push_back(byte);
    return true;
  });
  expect_equal(said.size(), kFromConnector, "bytes of the connector");
  auto [client, inside] = socket_pair();
  Handshake listener(std::move(inside), Role::listener, "the key", kListener.params, 10s);
  expect_equal(::send(client.get(), said.data(), said.size(), 0), 68, "sent");
  expect(finish(listener) == Step::refused, "an old proof was accepted");
});

const Test kGarbage("handshake: random bytes are refused by both ends", [] {
  for (const Role role : {Role::connector, Role::listener}) {
    auto [client, inside] = socket_pair();
    Handshake shake(std::move(inside), role, "the key", kListener.params, 10s);
    const std::string garbage(4096, 'G');
    expect_equal(::send(client.get(), garbage.data(), garbage.size(), 0), 4096, "sent");
    expect(finish(shake) == Step::refused, "random bytes were accepted");
    expect_says(shake.why(), "same key");
    expect_equal(shake.fd(), -1, "the socket after a refusal");
  }
});

const Test kSilence("handshake: silence is refused at the limit", [] {
  for (const Role role : {Role::connector, Role::listener}) {
    auto [client, inside] = socket_pair();
    Handshake shake(std::move(inside), role, "the key", kListener.params, 50ms);
    const Deadline deadline(10s);
    expect(finish(shake) == Step::refused, "silence was accepted");
    expect_says(shake.why(), "did not finish");
    expect(deadline.elapsed_s() >= 0.05 && deadline.elapsed_s() < 2, "when");
  }
});

// Waits until the limit of `shake` is over; gives its state then.
Step outlast_limit(Handshake& shake) {
  while (!shake.deadline().expired())
    poll_one(shake.fd(), POLLIN, std::max(shake.deadline().left(), std::chrono::nanoseconds{1ms}));
  return shake.advance();
}

const Test kPatient(
    "handshake: a patient connector that sent its proof waits for a late acceptance", [] {
      for (const bool patient : {true, false}) {
        auto [outside, inside] = socket_pair();
        HandshakeParams params = kConnector.params;
        params.patient = patient;
        Handshake connector(std::move(outside), Role::connector, "the key", params, 100ms);
        Handshake listener(std::move(inside), Role::listener, "the key", kListener.params);
        connector.advance();
        expect(listener.advance() == Step::want_read, "the listener answered");
        expect(connector.advance() == Step::want_read, "the proof is sent: " + connector.why());
        const Step late = outlast_limit(connector);
        expect(late == (patient ? Step::want_read : Step::refused), "after the limit");
        if (!patient) continue;
        expect(listener.advance() == Step::done, "the listener accepted:  " + listener.why());
        expect(connector.advance() == Step::done, "the late acceptance:  " + connector.why());
      }
    });

const Test kImpatient(
    "handshake: before its proof is sent a patient connector has a limit too", [] {
      auto [outside, inside] = socket_pair();
      HandshakeParams params = kConnector.params;
      params.patient = true;
      Handshake connector(std::move(outside), Role::connector, "the key", params, 50ms);
      expect(connector.advance() == Step::want_read, "the greeting is sent");
      expect(outlast_limit(connector) == Step::refused, "it waited for an answer without a limit");
    });

const Test kAfter("handshake: later bytes stay for the owner of the socket", [] {
  Wire wire;
  Handshake connector(std::move(wire.connector_end), Role::connector, "the key", kConnector.params);
  Handshake listener(std::move(wire.listener_end), Role::listener, "the key", kListener.params);
  const Middle all = [](bool, size_t, char&) { return true; };
  while (!is_over(listener.advance())) {
    connector.advance();
    wire.carry(all);
  }
  const Fd inside = listener.release();
  expect_equal(::send(inside.get(), "first", 5, MSG_NOSIGNAL), 5, "sent");
  wire.carry(all);
  expect(connector.advance() == Step::done, "done");
  const Fd outside = connector.release();
  std::array<char, 8> got{};
  expect_equal(::recv(outside.get(), got.data(), got.size(), 0), 5, "bytes that follow");
  expect_equal(std::string(got.data(), 5), "first", "what follows");
});

void meet(const Address& address) {
  const Fd door = listen_on(address, 8);
  expect(!accept_from(door.get()), "no connection is pending yet");
  const Address real = local_address(door.get());
  Handshake connector(start_connect(real), Role::connector, "the key", kConnector.params);
  connector.advance();
  expect(poll_one(door.get(), POLLIN, 5s) != 0, "no connection to " + real.text());
  Handshake listener(accept_from(door.get()), Role::listener, "the key", kListener.params);
  for (const Deadline deadline(10s); !deadline.expired();) {
    const Step left = connector.advance(), right = listener.advance();
    if (is_over(left) && is_over(right)) break;
  }
  expect(connector.advance() == Step::done, real.text() + ": " + connector.why());
  expect(listener.advance() == Step::done, real.text() + ": " + listener.why());
}

const Test kSockets("handshake: over TCP and over an abstract Unix socket", [] {
  meet(tcp_address("127.0.0.1", 0));
  meet(tcp_address("::1", 0));
  meet(abstract_unix_address("pycomm-handshake-test-" + std::to_string(::getpid())));
});

const Test kRefused("socket: a refused connection says so, over TCP and Unix", [] {
  const Address absent = abstract_unix_address("pycomm-absent-" + std::to_string(::getpid()));
  uint16_t port = 0;
  {
    const Fd door = listen_on(tcp_address("127.0.0.1", 0), 1);
    port = local_address(door.get()).port();
    expect_throws<InvalidArgument>([&] { listen_on(tcp_address("127.0.0.1", port), 1); });
  }
  for (const Address& address : {absent, tcp_address("127.0.0.1", port)}) {
    const Fd fd = start_connect(address);
    poll_one(fd.get(), POLLOUT, 5s);
    expect_equal(connect_error(fd.get()), ECONNREFUSED, address.text());
    Handshake shake(start_connect(address), Role::connector, "the key", kConnector.params);
    expect(finish(shake) == Step::refused, address.text());
    expect_equal(shake.why(), "Connection refused", "why");
  }
});

const Test kNames("socket: addresses say what they are", [] {
  expect_equal(tcp_address("127.0.0.1", 14758).text(), "127.0.0.1:14758", "IPv4");
  expect_equal(tcp_address("::1", 14758).text(), "[::1]:14758", "IPv6");
  expect_equal(tcp_address("127.0.0.1", 14758).port(), 14758, "port");
  expect_equal(tcp_address("", 0).host(), "::", "every interface");
  for (const auto* text : {"127.0.0.1:14758", "[::1]:14758", "[fd00::a:1]:1"})
    expect_equal(parse_tcp_address(text).text(), text, "read back");
  for (const auto* text : {"", ":", "[", "[]:1", "1.2.3.4", "1.2.3.4:", "1.2.3.4:99999",
                           "::1:14758", "[::1]", "[::1]14758", "host:1", "1.2.3.4:1x"})
    expect_says(expect_throws<InvalidArgument>([&] { parse_tcp_address(text); }), text);
  expect_equal(abstract_unix_address("x").text(), "@x", "Unix");
  expect_throws<InvalidArgument>([] { abstract_unix_address(""); });
  expect_throws<InvalidArgument>([] { abstract_unix_address(std::string(108, 'x')); });
  const std::string text =
      expect_throws<InvalidArgument>([] { tcp_address("no.such.invalid", 1); });
  expect_says(text, "no.such.invalid");
  expect_says(expect_throws<InvalidArgument>([] { tcp_address("fe80::1", 1); }),
              "needs its interface");
});

const Test kInterfaces(
    "interfaces: an interface, an address, a prefix or a list; else an error", [] {
      const auto chosen = [](const std::string& choice) {
        std::string text;
        for (const Address& address : chosen_addresses(choice)) text += address.host() + " ";
        return text;
      };
      for (const auto* choice : {"127.0.0.1", "127.0.0.0/8", "eth99,10.255.255.1,127.0.0.1"})
        expect_equal(chosen(choice), "127.0.0.1 ", choice);
      expect(chosen("lo").starts_with("127.0.0.1 "), "an interface");
      for (const auto* choice :
           {"eth99", "127.0.0.0/33", "127.0.0.0/", "127.0.0.0/8x", ",", "::2"}) {
        const auto text = expect_throws<InvalidArgument>([&] { chosen_addresses(choice); });
        expect_says(text, "GLOO_SOCKET_IFNAME is '" + std::string(choice) + "'");
        expect_says(text, "lo (127.0.0.1");
      }
      expect(!offered_addresses("").empty(), "a machine has at least its loopback");
      expect(offered_addresses("no.such.invalid").back().is_loopback(), "the loopback is last");
    });

}  // namespace
