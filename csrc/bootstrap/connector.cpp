#include "bootstrap/connector.h"

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"

namespace pycomm::bootstrap {
namespace {

// Connections accepted per round, so that handshakes in progress advance in between.
constexpr int kAcceptsInARound = 64;
constexpr std::chrono::milliseconds kRetry{50};

}  // namespace

Connector::Connector(Options options)
    : options_(std::move(options)), connected_(options_.addresses.size()) {}

void Connector::dial(int peer, bool reports_lost) {
  if (!connected_[static_cast<size_t>(peer)])
    dials_.try_emplace(peer, Dial{.reports_lost = reports_lost});
}

std::vector<engine::ConnectResult> Connector::poll(std::chrono::nanoseconds limit,
                                                   std::vector<pollfd>& also) {
  start_dials();
  wait(results_.empty() ? limit : std::chrono::nanoseconds{0}, also);
  accept();
  advance_dials();
  advance_pending();
  exchange();
  for (const engine::ConnectResult& result : results_) dials_.erase(result.peer);
  return std::exchange(results_, {});
}

std::string Connector::failure(int peer) const {
  const Dial& dial = dials_.at(peer);
  return " at " + address_of(peer).candidates[dial.candidate] +
         (dial.why.empty() ? "" : " (last failure: " + dial.why + ")");
}

// `peer`: the rank that this rank dials; -1: an accepted connection.
transport::Handshake Connector::make_handshake(os::Fd fd, int peer,
                                               transport::SocketTransport* by) {
  transport::HandshakeParams params{
      .context = options_.context, .rank = options_.rank, .expected = peer};
  params.agreed = options_.agreed;
  params.patient = true;  // the peer may have accepted when our limit passes
  if (peer != -1)
    return {std::move(fd), transport::Handshake::Role::connector, options_.key, std::move(params)};
  params.wanted = [this, by](int dial) { return is_wanted(dial, by); };
  return {std::move(fd), transport::Handshake::Role::listener, options_.key, std::move(params)};
}

bool Connector::is_wanted(int peer, const transport::SocketTransport* by) const {
  const auto i = static_cast<size_t>(peer);
  if (peer < 0 || i >= connected_.size() || connected_[i] || options_.addresses[i].transport != by)
    return false;
  const auto dial = dials_.find(peer);
  // If our dial is not connected, the peer received nothing and cannot have accepted it.
  return peer < options_.rank || dial == dials_.end() || !dial->second.handshake ||
         !dial->second.handshake->connected();
}

void Connector::start_dials() {
  for (auto& [peer, dial] : dials_) {
    if (dial.handshake || connected_[static_cast<size_t>(peer)] || Clock::now() < dial.retry_at)
      continue;
    const PeerAddress& to = address_of(peer);
    try {
      dial.step = transport::Handshake::Step::want_write;
      dial.handshake = std::make_unique<transport::Handshake>(make_handshake(
          to.transport->start_connect(to.candidates[dial.candidate]), peer, to.transport));
    } catch (const os::OutOfDescriptors&) {  // no failure of the peer
      throw;
    } catch (const os::Forbidden& error) {
      // The system may allow another address.
      dial.forbidden = options_.forbidden_is_final && to.candidates.size() == 1;
      ++dial.refused;
      failed(peer, dial, error.what());
    } catch (const Error& error) {
      ++dial.refused;
      failed(peer, dial, error.what());
    }
  }
}

void Connector::failed(int peer, Dial& dial, const std::string& why) {
  const PeerAddress& to = address_of(peer);
  dial.why = to.candidates[dial.candidate] + ": " + why;
  dial.candidate = (dial.candidate + 1) % to.candidates.size();
  dial.handshake.reset();
  dial.retry_at = Clock::now() + kRetry;
  ++dial.failures;
  if (options_.log)
    options_.log("connect to " + to.name + " failed " + std::to_string(dial.failures) +
                 " times with reason: " + dial.why + "; retry after 0.05 seconds");
  const bool hopeless = dial.forbidden || dial.refused >= options_.max_refusals ||
                        dial.failures >= options_.max_failures;
  if (hopeless && dial.reports_lost) {
    connected_[static_cast<size_t>(peer)] = true;  // never again
    const std::string_view hint = to.transport->name() == "shm"
                                      ? "; if the system forbids Unix sockets between these "
                                        "processes, set PYCOMM_TRANSPORT=tcp on every rank"
                                      : "";
    results_.push_back(
        {.peer = peer, .why = dial.why + std::string(hint), .forbidden = dial.forbidden});
  }
}

void Connector::wait(std::chrono::nanoseconds limit, std::vector<pollfd>& also) {
  std::vector<pollfd> polled = also;
  if (out_of_descriptors_) limit = std::min<std::chrono::nanoseconds>(limit, kPollInterval);
  for (const auto& transport : options_.transports) {
    if (out_of_descriptors_) break;
    for (const int listener : transport->listeners()) polled.push_back({listener, POLLIN, 0});
  }
  out_of_descriptors_ = false;
  const auto add = [&](const transport::Handshake& handshake, transport::Handshake::Step step) {
    const bool write = step == transport::Handshake::Step::want_write;
    polled.push_back({handshake.fd(), static_cast<short>(write ? POLLOUT : POLLIN), 0});
  };
  for (const auto& [peer, dial] : dials_) {
    if (dial.handshake) add(*dial.handshake, dial.step);
    if (!dial.handshake) limit = std::min<std::chrono::nanoseconds>(limit, kRetry);
  }
  for (const PendingConnection& connection : pending_) add(connection.handshake, connection.step);
  if (!pending_.empty() || !dials_.empty())  // handshakes have limits of their own
    limit = std::min<std::chrono::nanoseconds>(limit, kPollInterval);
  for (const PendingExchange& exchange : exchanges_)
    polled.push_back({exchange.fd.get(), POLLIN, 0});
  ::poll(polled.data(), polled.size(),
         static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(limit).count()));
  std::copy_n(polled.begin(), also.size(), also.begin());
}

void Connector::accept() {
  for (const auto& transport : options_.transports) {
    for (const int listener : transport->listeners()) {
      if (out_of_descriptors_) break;
      for (int i = 0; i < kAcceptsInARound; ++i) {
        os::Fd fd = os::accept_from(listener, &out_of_descriptors_);
        if (!fd) break;
        if (admission_.is_full(pending_.size())) evict();
        const uint64_t source = transport::source_of(fd.get());
        pending_.push_back(
            {transport.get(), make_handshake(std::move(fd), -1, transport.get()), source});
        if (!advance(pending_.back())) pending_.pop_back();  // its greeting may have arrived
      }
    }
  }
  // Out of descriptors: pending connections may hold them.
  for (size_t i = out_of_descriptors_ ? (pending_.size() + 3) / 4 : 0; i > 0; --i) evict();
}

void Connector::evict() {
  (void)admission_.evict(pending_, [](const PendingConnection& one) {
    return transport::Pending{one.source, one.handshake.greeted()};
  });
}

void Connector::advance_dials() {
  for (auto& [peer, dial] : dials_) {
    if (!dial.handshake) continue;
    switch (dial.step = dial.handshake->advance()) {
      case transport::Handshake::Step::done:
        add_connection(peer, *std::exchange(dial.handshake, nullptr), true);
        break;
      case transport::Handshake::Step::refused:
        if (dial.handshake->declined()) {  // the peer dials this rank
          dial.handshake.reset();
          dial.retry_at = Clock::now() + kRetry;
          break;
        }
        if (dial.handshake->differs()) {
          reject(peer, address_of(peer).candidates[dial.candidate] + ": " + dial.handshake->why());
          break;
        }
        // The peer may have evicted this connection. The caller limits the retries.
        if (dial.handshake->was_disconnected()) {
          dial.why = address_of(peer).candidates[dial.candidate] + ": " + dial.handshake->why();
          dial.handshake.reset();
          dial.retry_at = Clock::now() + kRetry;
          break;
        }
        if (!dial.handshake->connected()) ++dial.refused;
        failed(peer, dial, std::string(dial.handshake->why()));
        break;
      case transport::Handshake::Step::want_read:
      case transport::Handshake::Step::want_write:
        break;
    }
  }
}

void Connector::advance_pending() {
  for (auto at = pending_.begin(); at != pending_.end();)
    at = advance(*at) ? std::next(at) : pending_.erase(at);
}

// Returns false when the handshake is over.
bool Connector::advance(PendingConnection& connection) {
  connection.step = connection.handshake.advance();
  if (connection.handshake.differs())
    reject(connection.handshake.peer(), connection.handshake.why());
  if (connection.step == transport::Handshake::Step::done)
    add_connection(connection.handshake.peer(), connection.handshake, false);
  return connection.step != transport::Handshake::Step::done &&
         connection.step != transport::Handshake::Step::refused;
}

// The peer read other rank infos: another attempt would fail in the same way.
void Connector::reject(int peer, const std::string& why) {
  const auto i = static_cast<size_t>(peer);
  if (peer < 0 || i >= connected_.size() || connected_[i]) return;
  connected_[i] = true;
  results_.push_back({.peer = peer, .channel = {}, .why = why, .differs = true});
}

// Both ends accepted this connection. A dial of our own is dropped. `dialed`: by this rank.
void Connector::add_connection(int peer, transport::Handshake& handshake, bool dialed) {
  transport::Session session{.secret = handshake.session_secret(), .connector = dialed};
  os::Fd fd = handshake.release();
  connected_[static_cast<size_t>(peer)] = true;
  if (const auto dial = dials_.find(peer); dial != dials_.end()) dial->second.handshake.reset();
  try {
    address_of(peer).transport->send_memory(fd.get());
    exchanges_.push_back({peer, std::move(fd), std::move(session)});
  } catch (const os::OutOfDescriptors&) {
    throw;
  } catch (const Error& error) {
    results_.push_back({.peer = peer, .why = error.what()});
  }
}

void Connector::exchange() {
  for (auto at = exchanges_.begin(); at != exchanges_.end();) {
    transport::SocketTransport& by = *address_of(at->peer).transport;
    if (by.exchanges() && os::poll_one(at->fd.get(), POLLIN, std::chrono::nanoseconds{0}) == 0) {
      ++at;
      continue;
    }
    engine::ConnectResult& result = results_.emplace_back();
    result.peer = at->peer;
    try {
      result.channel = by.accept(std::move(at->fd), Deadline(std::chrono::nanoseconds{0}));
      if (address_of(at->peer).encrypted)
        result.channel = transport::make_encrypted(std::move(result.channel), at->session);
    } catch (const os::OutOfDescriptors&) {
      throw;
    } catch (const Error& error) {
      result.why = error.what();
    }
    at = exchanges_.erase(at);
  }
}

}  // namespace pycomm::bootstrap
