#include "device_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "error.hpp"
#include "file.hpp"

namespace zs {
namespace {

int duplicate(int fd) {
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw system_error(Kind::storage, "cannot use file descriptor " + std::to_string(fd), errno);
  return own;
}

// `move` as cuFile does, which may stop short: the next move must begin at a whole page again. Gives how much
// of `nbytes` was moved: less than all of them if nothing came, or less than a page.
template <class Move>
uint64_t move_pages(uint64_t nbytes, Move&& move) {
  const uint64_t whole = (nbytes + File::kAlign - 1) / File::kAlign * File::kAlign;
  for (uint64_t done = 0; done < nbytes;) {
    const uint64_t got = move(done, whole - done);
    if (done + got >= nbytes) break;
    if (got < File::kAlign) return done + got;
    done += got - got % File::kAlign;
  }
  return nbytes;
}

Error stopped(uint64_t at) {
  return Error(Kind::storage, "cuFile stopped at byte " + std::to_string(at), EIO);
}

}  // namespace

DeviceFile::DeviceFile(std::shared_ptr<cuda::Context> on, int fd)
    : context(std::move(on)), fd_(duplicate(fd)), flags_(::fcntl(fd_, F_GETFL)) {
  try {
    if (::fcntl(fd_, F_SETFL, flags_ | O_DIRECT) != 0)
      throw system_error(Kind::capability, "the file system refuses O_DIRECT", errno);
    const cuda::Context::Current current(*context);
    handle_ = std::make_unique<const cufile::Handle>(fd_);
  } catch (...) {
    ::fcntl(fd_, F_SETFL, flags_);
    ::close(fd_);
    throw;
  }
}

DeviceFile::~DeviceFile() {
  handle_.reset();
  ::fcntl(fd_, F_SETFL, flags_);  // flags belong to the open file, which is somebody else's
  ::close(fd_);
}

bool DeviceFile::read(CUdeviceptr to, uint64_t nbytes, uint64_t offset) const {
  const uint64_t moved = move_pages(
      nbytes, [&](uint64_t done, uint64_t most) { return handle_->read(to + done, most, offset + done); });
  if (moved == nbytes) return true;
  struct stat about;
  if (::fstat(fd_, &about) != 0) throw system_error(Kind::storage, "cannot ask for a file's size", errno);
  if (offset + moved < static_cast<uint64_t>(about.st_size)) throw stopped(offset + moved);
  return false;
}

void DeviceFile::write(CUdeviceptr base, uint64_t within, uint64_t nbytes, uint64_t offset) const {
  const uint64_t moved = move_pages(nbytes, [&](uint64_t done, uint64_t most) {
    return handle_->write(base, within + done, most, offset + done);
  });
  if (moved < nbytes) throw stopped(offset + moved);
}

std::shared_ptr<DeviceTransfer> DeviceTransfer::begin(const Pool& pool,
                                                      std::shared_ptr<const DeviceFile> file, Way way,
                                                      CUdeviceptr memory, uint64_t nbytes, uint64_t offset,
                                                      CUdeviceptr base) {
  if (offset % File::kAlign != 0)
    throw Error(Kind::usage, "a direct transfer begins at a whole page of the file");
  std::shared_ptr<DeviceTransfer> job(
      new DeviceTransfer(pool, std::move(file), way, memory, nbytes, offset, base == 0 ? memory : base));
  job->start();
  return job;
}

DeviceTransfer::DeviceTransfer(const Pool& pool, std::shared_ptr<const DeviceFile> file, Way way,
                               CUdeviceptr memory, uint64_t nbytes, uint64_t offset, CUdeviceptr base)
    : Job(pool.workers(), (nbytes + kBlock - 1) / kBlock),
      file_(std::move(file)),
      way_(way),
      memory_(memory),
      base_(base),
      nbytes_(nbytes),
      offset_(offset) {}

void DeviceTransfer::work(uint64_t block) {
  const cuda::Context::Current current(*file_->context);
  const uint64_t begin = block * kBlock, nbytes = std::min(nbytes_ - begin, kBlock);
  if (way_ == Way::to_file)
    file_->write(base_, memory_ - base_ + begin, nbytes, offset_ + begin);
  else if (!file_->read(memory_ + begin, nbytes, offset_ + begin))
    throw Error(Kind::corrupt, "the file ends before byte " + std::to_string(offset_ + begin + nbytes));
  add_progress(nbytes);
}

}  // namespace zs
