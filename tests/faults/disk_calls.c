/* Records the calls that change files, for power_cut.py. It is preloaded with DISK_ROOT, the folder whose
 * files count. Each call is a line of six fields in DISK_ROOT.calls (call, file number, offset or size, bytes
 * written, path, second path), followed by the bytes. A lock keeps the order of all threads and processes.
 * Calls that are missing here would show: the recorded calls must lead to the files that there are.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int begin(const char *path) /* returns the record, locked, or -1 for a path outside the root */
{
    char *root = getenv("DISK_ROOT"), calls[PATH_MAX];
    size_t size = root ? strlen(root) : 0;
    if (!root || strncmp(path, root, size) || (path[size] && path[size] != '/'))
        return -1;
    sprintf(calls, "%s.calls", root);
    int record = syscall(SYS_openat, AT_FDCWD, calls, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (record < 0 || flock(record, LOCK_EX))
        abort();
    return record;
}

/* The call was of a descriptor, or of AT_FDCWD and the path. An offset below 0 is where the file now is. */
static long end(int record, long done, const char *call, int fd, long at, const void *data, const char *path,
                const char *second)
{
    int error = errno;
    struct stat status = {0};
    if (record >= 0 && done >= 0) {
        long size = data ? done : 0;
        fstatat(fd, fd < 0 ? path : "", &status, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
        at = at < 0 ? lseek(fd, 0, SEEK_CUR) - size : at;
        if (dprintf(record, "%s\t%ld\t%ld\t%ld\t%s\t%s\n", call, status.st_ino, at, size, path, second) < 0 ||
            syscall(SYS_write, record, data, size) < size)
            abort();
    }
    if (record >= 0)
        syscall(SYS_close, record);
    errno = error;
    return done;
}

/* Returns the path of a descriptor, and of a name in a folder that is open. */
static char *path_of(int fd, const char *name, char *path)
{
    char link[64];
    sprintf(link, "/proc/self/fd/%d", fd);
    ssize_t size = name[0] == '/' ? 0 : readlink(link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return strcat(size > 0 && name[0] ? strcat(path, "/") : path, name);
}

/* The body of a function on a descriptor: the fields AT and DATA, then the system call. */
#define ON_DESCRIPTOR(CALL, AT, DATA, ...)                                                                   \
    {                                                                                                        \
        char path[PATH_MAX];                                                                                 \
        int record = begin(path_of(fd, "", path));                                                           \
        return end(record, syscall(__VA_ARGS__), CALL, fd, AT, DATA, path, "");                              \
    }
/* The body of a function on a path. The working folder is not under the root. */
#define ON_PATH(CALL, PATH, SECOND, ...)                                                                     \
    {                                                                                                        \
        int record = begin(PATH);                                                                            \
        return end(record, syscall(__VA_ARGS__), CALL, AT_FDCWD, 0, NULL, PATH, SECOND);                     \
    }

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    int record = flags & (O_CREAT | O_TRUNC) ? begin(path) : -1;
    int fd = syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    return end(record, fd, flags & O_TRUNC ? "new" : "open", fd, 0, NULL, path, "");
}

int open64(const char *, int, ...) __attribute__((alias("open")));
ssize_t write(int fd, const void *data, size_t size)
    ON_DESCRIPTOR("write", -1, data, SYS_write, fd, data, size)
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
    ON_DESCRIPTOR("write", at, data, SYS_pwrite64, fd, data, size, at)
ssize_t pwrite64(int, const void *, size_t, off_t) __attribute__((alias("pwrite")));
int fsync(int fd) ON_DESCRIPTOR("fsync", 0, NULL, SYS_fsync, fd)
int ftruncate(int fd, off_t size) ON_DESCRIPTOR("truncate", size, NULL, SYS_ftruncate, fd, size)
int ftruncate64(int, off_t) __attribute__((alias("ftruncate")));
int rename(const char *old, const char *new)
    ON_PATH("rename", old, new, SYS_renameat2, AT_FDCWD, old, AT_FDCWD, new, 0)
int link(const char *old, const char *new)
    ON_PATH("link", old, new, SYS_linkat, AT_FDCWD, old, AT_FDCWD, new, 0)
int symlink(const char *target, const char *name)
    ON_PATH("symlink", name, target, SYS_symlinkat, target, AT_FDCWD, name)
int mkdir(const char *name, mode_t mode) ON_PATH("mkdir", name, "", SYS_mkdirat, AT_FDCWD, name, mode)
int unlinkat(int folder, const char *name, int flags)
{
    char path[2 * PATH_MAX];
    int record = begin(path_of(folder, name, path));
    return end(record, syscall(SYS_unlinkat, folder, name, flags), "unlink", AT_FDCWD, 0, NULL, path, "");
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
