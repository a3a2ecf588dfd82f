// Bytes that a connection receives before authentication: both ends of a handshake with an attacker
// between them, or one end and an unauthenticated client.
//
// The first byte of the input selects the ends. 0: both ends hold the key, and the rest of the
// input changes the transmitted bytes in order (exclusive or). 1, 2: the rest is sent by an
// unauthenticated client to a listener, to a connector.
#include <sys/socket.h>

#include <optional>

#include "fuzz.h"
#include "transport/handshake.h"

namespace {

using namespace pycomm;
using Role = transport::Handshake::Role;
using Step = transport::Handshake::Step;

constexpr size_t kProven = 36 + 68 + 32;  // bytes that proofs cover, or are
constexpr int kMostRounds = 200;

// One end, and the descriptor at which it is spoken to.
struct End {
  explicit End(Role role) {
    int fds[2];
    fuzz::demand(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0,
                 "no pair of sockets");
    outside = os::Fd(fds[1]);
    handshake.emplace(os::Fd(fds[0]), role, "a key",
                      transport::HandshakeParams{"world", role == Role::listener ? 0 : 1});
  }
  std::string hear() const {
    char bytes[256];
    const ssize_t n = ::recv(outside.get(), bytes, sizeof bytes, 0);
    return {bytes, n > 0 ? static_cast<size_t>(n) : 0};
  }
  void say(const std::string& bytes) const {
    (void)!::send(outside.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  bool over() const { return step == Step::done || step == Step::refused; }

  os::Fd outside;
  std::optional<transport::Handshake> handshake;
  Step step = Step::want_write;
};

void stand_between(fuzz::Input changes) {
  End connector(Role::connector), listener(Role::listener);
  size_t passed = 0;
  bool changed = false;
  const auto pass = [&](const End& from, const End& to) {
    std::string bytes = from.hear();
    for (char& byte : bytes) {
      const auto change = passed < changes.size() ? changes[passed] : std::byte{0};
      changed |= change != std::byte{0} && passed < kProven;
      byte = static_cast<char>(static_cast<std::byte>(byte) ^ change);
      ++passed;
    }
    to.say(bytes);
  };
  for (int round = 0; round < 6; ++round)
    for (End* end : {&connector, &listener}) {
      if (!end->over()) end->step = end->handshake->advance();
      if (end->step == Step::refused) end->outside.reset();
      pass(*end, end == &connector ? listener : connector);
    }
  const bool both = connector.step == Step::done && listener.step == Step::done;
  fuzz::demand(!(changed && (both || listener.step == Step::done)),
               "a changed conversation was accepted");
  fuzz::demand(both || passed > 0, "no peer spoke");
  if (changes.empty()) fuzz::demand(both, "two ends with the key did not connect");
}

void talk_to(Role role, fuzz::Input said) {
  End end(role);
  int round = 0;
  for (size_t at = 0; !end.over() && round < kMostRounds; ++round) {
    const size_t n = std::min<size_t>(said.size() - at, 1 + at % 61);
    end.say(std::string(reinterpret_cast<const char*>(said.data()) + at, n));
    at += n;
    if (at == said.size()) end.outside.reset();
    end.step = end.handshake->advance();
  }
  fuzz::demand(end.over(), "a handshake continues without a peer");
  fuzz::demand(end.step == Step::refused, "an unauthenticated client was accepted");
  fuzz::demand(!end.handshake->why().empty(), "a client was refused without a reason");
}

}  // namespace

void fuzz::one(Input input) {
  const auto who = input.empty() ? 0 : std::to_integer<int>(input[0]) % 3;
  const Input rest = input.empty() ? input : input.subspan(1);
  if (who == 0) return stand_between(rest);
  talk_to(who == 1 ? Role::listener : Role::connector, rest);
}
