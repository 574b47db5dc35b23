# Runs libvirtd in name spaces of its own: libvirtd.sh FOLDER RUN UUID PROGRAMS
#
# FOLDER keeps its state, its logs and its socket; RUN is what it and its QEMUs see as /run/remoca; PROGRAMS comes first
# in their PATH. FOLDER/files is copied to what it sees as /etc, which is otherwise a copy of the machine's.
set -eu
folder=$1 run=$2 uuid=$3 programs=$4
mkdir -p "$folder/lib" "$folder/log" "$folder/cache"
cp -a /etc "$folder/"
cp -a "$folder/files/." "$folder/etc/"
mount --bind "$folder/etc" /etc
# Hides the host's D-Bus: no systemd-machined must hear of these guests.
mount -t tmpfs run /run
mkdir -p /run/remoca /var/lib/libvirt /var/log/libvirt /var/cache/libvirt
mount --bind "$run" /run/remoca
for name in lib log cache; do
    mount --bind "$folder/$name" "/var/$name/libvirt"
done
# A user and a group that another package makes; the daemon does not start without them.
echo "libvirt-qemu:x:0:0::/:/bin/false" >> /etc/passwd
echo "libvirt-qemu:x:0:" >> /etc/group

cat > /etc/libvirt/qemu.conf << END
security_driver = "none"
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
END
cat > /etc/libvirt/libvirtd.conf << END
unix_sock_dir = "$folder"
auth_unix_rw = "none"
host_uuid = "$uuid"
END
export PATH="$programs:$PATH"
# A shell as the first process collects QEMUs that end.
libvirtd &
wait $!
