#include "unload.hpp"

#include <algorithm>

#include "crc32c.hpp"
#include "error.hpp"
#include "failpoint.hpp"

namespace zs {
namespace {
constexpr uint64_t kAhead =
    8;  // chunks in flight: enough for the bus, and soon over when somebody else comes
}

std::shared_ptr<Unload> Unload::begin(const Pool& pool, std::shared_ptr<Device> device, const Vault& vault,
                                      uint64_t at, std::byte* image, uint64_t nbytes, uint64_t chunk_bytes,
                                      std::span<const std::pair<uint64_t, uint64_t>> runs) {
  if (chunk_bytes == 0 || at > vault.nbytes() || nbytes > vault.nbytes() - at)
    throw Error(Kind::usage, "the image does not lie in the vault's memory");
  const uint64_t chunks = (nbytes + chunk_bytes - 1) / chunk_bytes;
  auto lane = std::make_shared<Lane>();
  lane->way = cuda::Way::to_host;
  lane->ahead = kAhead;
  lane->pinned = cuda::is_pinned(image);
  std::vector<uint64_t> on_host;
  size_t next = 0;
  uint64_t last_end = 0;
  for (const auto& [offset, size] : runs) {
    if (offset < last_end || offset > nbytes || size > nbytes - offset)
      throw Error(Kind::usage, "the runs of an image rise and end within it");
    last_end = offset + size;
  }
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const uint64_t begin = chunk * chunk_bytes, end = std::min(nbytes, begin + chunk_bytes);
    while (next < runs.size() && runs[next].first + runs[next].second <= begin) ++next;
    bool any = false;
    for (size_t k = next; k < runs.size() && runs[k].first < end; ++k) {
      const uint64_t from = std::max(begin, runs[k].first);
      const uint64_t to = std::min(end, runs[k].first + runs[k].second);
      if (from >= to) continue;
      if (!any) lane->open(chunk);
      any = true;
      lane->add({reinterpret_cast<CUdeviceptr>(image + from), vault.at() + at + from, to - from});
    }
    if (!any) on_host.push_back(chunk);
  }
  std::shared_ptr<Unload> job(
      new Unload(pool, std::move(device), std::move(lane), image, nbytes, chunk_bytes, std::move(on_host)));
  if (!job->lane_->parts.empty()) {
    job->lane_->landing = job.get();
    try {
      job->device_->begin(job->lane_, nullptr, {}, cuda::Way::within, job);
    } catch (...) {
      job->cancel();
      throw;
    }
  }
  job->start();
  return job;
}

Unload::Unload(const Pool& pool, std::shared_ptr<Device> device, std::shared_ptr<Lane> lane, std::byte* image,
               uint64_t nbytes, uint64_t chunk_bytes, std::vector<uint64_t> on_host)
    : Job(pool.workers(), on_host.size() + lane->parts.size(), lane->parts.size()),
      device_(std::move(device)),
      lane_(std::move(lane)),
      image_(image),
      nbytes_(nbytes),
      chunk_bytes_(chunk_bytes),
      on_host_(std::move(on_host)),
      checksums_((nbytes + chunk_bytes - 1) / chunk_bytes) {}

void Unload::check(uint64_t chunk) {
  const uint64_t begin = chunk * chunk_bytes_, end = std::min(nbytes_, begin + chunk_bytes_);
  failpoint("unload", chunk);
  checksums_[chunk] = crc32c(image_ + begin, end - begin);
  add_progress(end - begin);
}

void Unload::work(uint64_t unit) {
  check(on_host_[unit]);
}

bool Unload::has_work() const {
  if (Job::has_work()) return true;
  const std::lock_guard lock(mutex_);
  return !landed_.empty();
}

bool Unload::work_aside() {
  uint64_t chunk = 0;
  {
    const std::lock_guard lock(mutex_);
    if (landed_.empty()) return false;
    chunk = landed_.back();
    landed_.pop_back();
  }
  check(chunk);
  retire(1);
  return true;
}

void Unload::landed(std::span<const uint64_t> chunks) noexcept {
  {
    const std::lock_guard lock(mutex_);
    landed_.insert(landed_.end(), chunks.begin(), chunks.end());
  }
  try {
    workers_->add(shared_from_this());
  } catch (const Error&) {
    while (work_aside()) {  // the pool is closed: nobody else will
    }
  }
}

void Unload::dropped(uint64_t chunks, std::exception_ptr why) noexcept {
  fail(std::move(why));
  retire(chunks);
}

uint64_t Unload::drop_kept() noexcept {
  return device_->drop(*lane_);
}

}  // namespace zs
