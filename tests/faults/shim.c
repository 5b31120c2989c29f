/* System calls that change files, made to fail, to stop short, to kill the process, or to be recorded.
 *
 * Preloaded into the process under test (LD_PRELOAD). `fault_arm` chooses the folder that is watched and what happens
 * at the N-th watched call; calls outside of the folder, and those of child processes, pass unchanged. The calls go to
 * the kernel directly, so that no library in between is missed. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { RECORD, FAIL, FULL, SHORT, KILL };

static char root[PATH_MAX];
static size_t root_bytes;
static long calls, strike_at;
static int mode, error_number, trace = -1;
static pid_t owner;

void fault_arm(const char *folder, long at, int how, int error, int trace_file) {
    strncpy(root, folder, sizeof root - 1);
    root_bytes = strlen(root);
    calls = 0;
    strike_at = at, mode = how, error_number = error, trace = trace_file;
    owner = getpid();
}

static int watched(const char *path) {
    return root_bytes && owner == getpid() && !strncmp(path, root, root_bytes) &&
           (path[root_bytes] == '/' || !path[root_bytes]);
}

static int path_of(int descriptor, char *path) { /* PATH_MAX bytes */
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return size > 0 && watched(path);
}

static int absolute(int folder, const char *name, char *path) {
    path[0] = 0;
    if (!root_bytes || !name) return 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char base[PATH_MAX / 2] = "";
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) < 0) return 0;
        } else {
            char place[PATH_MAX];
            if (!path_of(folder, place) || strlen(place) >= sizeof base) return 0;
            strcpy(base, place);
        }
        while (name[0] == '.' && name[1] == '/') name += 2;
        snprintf(path, PATH_MAX, "%s/%s", base, name);
    }
    return watched(path);
}

static void record(const char *operation, const char *path, const char *other, long offset, const void *data,
                   size_t size, int failed) {
    if (trace < 0) return;
    char line[2 * PATH_MAX + 128];
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\t%d\n", operation, path, other, offset, size, failed);
    syscall(SYS_write, trace, line, (size_t)length);
    if (size) syscall(SYS_write, trace, data, size);
}

/* Whether this call is the one that fails. `grows`: it needs room on the disk. */
static int strikes(int grows, int restartable) {
    calls++;
    if (calls < strike_at || mode == RECORD || mode == SHORT) return 0;
    if (mode == FULL) {
        if (!grows) return 0;
    } else if (calls != strike_at) {
        return 0;
    }
    if (mode == KILL) {
        syscall(SYS_kill, getpid(), SIGKILL);
    }
    if (error_number == EINTR && !restartable) return 0; /* the kernel never returns it here */
    errno = error_number;
    return 1;
}

static int open_at(int folder, const char *name, int flags, mode_t permissions) {
    char path[PATH_MAX];
    int writes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC);
    int seen = writes && absolute(folder, name, path);
    if (seen && strikes(flags & (O_CREAT | O_TRUNC), 1)) {
        record("open", path, "", 0, NULL, 0, 1);
        return -1;
    }
    int found = (int)syscall(SYS_openat, folder, name, flags, permissions);
    if (seen) {
        int error = errno;
        record(flags & O_TRUNC ? "empty" : "open", path, "", 0, NULL, 0, found < 0);
        errno = error;
    }
    return found;
}

#define PERMISSIONS                                                  \
    mode_t permissions = 0;                                          \
    if (flags & (O_CREAT | O_TMPFILE)) {                             \
        va_list rest;                                                \
        va_start(rest, flags);                                       \
        permissions = (mode_t)va_arg(rest, int);                     \
        va_end(rest);                                                \
    }

int open(const char *name, int flags, ...) { PERMISSIONS return open_at(AT_FDCWD, name, flags, permissions); }
int open64(const char *name, int flags, ...) { PERMISSIONS return open_at(AT_FDCWD, name, flags, permissions); }
int openat(int folder, const char *name, int flags, ...) { PERMISSIONS return open_at(folder, name, flags, permissions); }
int openat64(int folder, const char *name, int flags, ...) { PERMISSIONS return open_at(folder, name, flags, permissions); }

/* offset < 0: at the file's position, or at its end where it was opened to append */
static ssize_t write_at(int descriptor, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    int seen = root_bytes && owner == getpid() && descriptor > 2 && path_of(descriptor, path);
    off_t place = offset;
    if (seen) {
        if (mode == KILL && calls + 1 == strike_at) { /* half of it reached the file */
            syscall(SYS_write, descriptor, data, size / 2);
        }
        if (mode == FULL && calls + 1 >= strike_at && size > 1) {
            syscall(SYS_write, descriptor, data, size / 2);
        }
        if (strikes(1, 1)) {
            record("write", path, "", 0, NULL, 0, 1);
            return -1;
        }
        if (mode == SHORT && calls == strike_at && size > 1) size /= 2;
        if (offset < 0) {
            long flags = syscall(SYS_fcntl, descriptor, F_GETFL);
            struct stat status;
            place = flags & O_APPEND && !fstat(descriptor, &status) ? status.st_size
                                                                   : (off_t)syscall(SYS_lseek, descriptor, 0, SEEK_CUR);
        }
    }
    ssize_t written = offset < 0 ? syscall(SYS_write, descriptor, data, size)
                                 : syscall(SYS_pwrite64, descriptor, data, size, offset);
    if (seen) {
        int error = errno;
        record("write", path, "", (long)place, data, written < 0 ? 0 : (size_t)written, written < 0);
        errno = error;
    }
    return written;
}

ssize_t write(int descriptor, const void *data, size_t size) { return write_at(descriptor, data, size, -1); }
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) { return write_at(descriptor, data, size, offset); }
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) { return write_at(descriptor, data, size, offset); }

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    if (!(root_bytes && owner == getpid() && descriptor > 2 && path_of(descriptor, path)))
        return syscall(SYS_writev, descriptor, parts, count);
    for (int part = 0; part < count; part++) /* a short write, which callers of writev expect */
        if (parts[part].iov_len) return write_at(descriptor, parts[part].iov_base, parts[part].iov_len, -1);
    return 0;
}

static int by_descriptor(const char *operation, int descriptor, long number, long size) {
    char path[PATH_MAX];
    int seen = root_bytes && owner == getpid() && path_of(descriptor, path);
    int is_sync = number != SYS_ftruncate;
    if (seen && strikes(0, 1)) {
        record(operation, path, "", size, NULL, 0, 1);
        return -1;
    }
    /* Killing a process does not lose what the kernel holds, and waiting for real disks takes minutes. */
    int result = seen && is_sync ? 0 : (int)syscall(number, descriptor, size);
    if (seen) record(operation, path, "", size, NULL, 0, result < 0);
    return result;
}

int fsync(int descriptor) { return by_descriptor("fsync", descriptor, SYS_fsync, 0); }
int fdatasync(int descriptor) { return by_descriptor("fsync", descriptor, SYS_fdatasync, 0); }
int ftruncate(int descriptor, off_t size) { return by_descriptor("truncate", descriptor, SYS_ftruncate, size); }
int ftruncate64(int descriptor, off64_t size) { return by_descriptor("truncate", descriptor, SYS_ftruncate, size); }

static int rename_at(int from, const char *old, int to, const char *new, unsigned flags) {
    char path[PATH_MAX], other[PATH_MAX];
    int seen = absolute(from, old, path) | absolute(to, new, other);
    if (seen && strikes(0, 0)) {
        record("rename", path, other, 0, NULL, 0, 1);
        return -1;
    }
    int result = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (seen) {
        int error = errno;
        record("rename", path, other, 0, NULL, 0, result < 0);
        errno = error;
    }
    return result;
}

int rename(const char *old, const char *new) { return rename_at(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return rename_at(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return rename_at(from, old, to, new, flags); }

static int by_name(const char *operation, int folder, const char *name, long number, int value, int grows) {
    char path[PATH_MAX];
    int seen = absolute(folder, name, path);
    if (seen && strikes(grows, 0)) {
        record(operation, path, "", 0, NULL, 0, 1);
        return -1;
    }
    int result = (int)syscall(number, folder, name, value);
    if (seen) {
        int error = errno;
        record(operation, path, "", 0, NULL, 0, result < 0);
        errno = error;
    }
    return result;
}

int mkdir(const char *name, mode_t permissions) { return by_name("mkdir", AT_FDCWD, name, SYS_mkdirat, (int)permissions, 1); }
int mkdirat(int folder, const char *name, mode_t permissions) { return by_name("mkdir", folder, name, SYS_mkdirat, (int)permissions, 1); }
int unlink(const char *name) { return by_name("unlink", AT_FDCWD, name, SYS_unlinkat, 0, 0); }
int rmdir(const char *name) { return by_name("rmdir", AT_FDCWD, name, SYS_unlinkat, AT_REMOVEDIR, 0); }
int unlinkat(int folder, const char *name, int flags) {
    return by_name(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, name, SYS_unlinkat, flags, 0);
}

static void *map(void *address, size_t size, int protection, int flags, int descriptor, off_t offset) {
    char path[PATH_MAX];
    int seen = root_bytes && descriptor >= 0 && owner == getpid() && path_of(descriptor, path);
    if (seen && strikes(0, 0)) {
        record("mmap", path, "", 0, NULL, 0, 1);
        return MAP_FAILED;
    }
    long found = syscall(SYS_mmap, address, size, protection, flags, descriptor, offset);
    if (seen) {
        int error = errno;
        record("mmap", path, "", 0, NULL, 0, (void *)found == MAP_FAILED);
        errno = error;
    }
    return (void *)found;
}

void *mmap(void *address, size_t size, int protection, int flags, int descriptor, off_t offset) {
    return map(address, size, protection, flags, descriptor, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int descriptor, off64_t offset) {
    return map(address, size, protection, flags, descriptor, offset);
}
